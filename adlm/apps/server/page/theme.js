// Runs before the first paint, so that the page does not flash in the other theme.
{
  let chosen = null;
  try { chosen = localStorage.getItem("adlm-theme"); } catch { /* storage is disabled */ }
  const dark = chosen === null ? matchMedia("(prefers-color-scheme: dark)").matches : chosen === "dark";
  document.documentElement.dataset.theme = dark ? "dark" : "light";
}
