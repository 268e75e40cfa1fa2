// The studio: one form, one or two sampling runs that are shown while they are computed, and the bound of a text.
import { RequestError, getJson, getText, postJson, setKey, stream } from "./connection.js";
import { HeatText } from "./heat.js";
import { ConstraintForm } from "./constraints.js";
import { Card, Timeline, TraceStates, TraceText, legend, listenToKeys, make, switchTheme } from "./viewer.js";

const $ = (id) => document.getElementById(id);
const EXAMPLES = {
  infill: '"Good morning," said the [MASK*2]. "I hope [MASK*6] to-day." "Thank you," said the [MASK*3], "I [MASK*2] well."',
  continue: "The old man looked at the sea, and [MASK*24]",
  form: "The [MASK*1:who] wrote to his aunt on [MASK*10:day], and [MASK*5] to London.",
  nothing: "[MASK*32]",
};
const FORM = ['who=choices:["captain","doctor","lawyer"]', "day=regex:18[0-9]{2}-(0[1-9]|1[0-2])-[0-2][1-9]"];   // of the example
const HOLE = /\[MASK(?:\*((?:\d*\.\.)?\d+|))?(?::([A-Za-z_][A-Za-z0-9_]{0,31}))?\]/g;   // as in adlm/canvas.py
const timeline = new Timeline($("bar"), 180), card = new Card($("card"), $("bar"));
const constraints = new ConstraintForm($("constraints"), $("constraint-rows"), (name) => showChoices(name));
let server = null;   // GET /v1/studio
let running = null;   // the AbortController of what runs now
let isFilling = false;   // whether that is a sampling run
let runs = [];   // {request, trace, view, pane} of each pane, the last time the holes were filled
let shown = "";   // what a link shows besides the form: "", "fill" or "score"
let scored = "";   // the text whose bound is shown
let linkedStep;   // the step that a link shows, once its text is filled in

const prefersStill = () => matchMedia("(prefers-reduced-motion: reduce)").matches;

// ---- the form

const modelOf = (name) => server.models.find((model) => model.name === name);

function fillSelect(select, values, chosen) {
  select.replaceChildren(...values.map((value) => new Option(value, value, false, value === chosen)));
}

// The samplers that work with the chosen model; the sampler stays if it does.
function offerSamplers(modelSelect, samplerSelect) {
  const model = modelOf(modelSelect.value);
  const kept = model.samplers.includes(samplerSelect.value) ? samplerSelect.value : model.sampling.sampler;
  fillSelect(samplerSelect, model.samplers, kept);
  describeSampler(samplerSelect);
}

function describeSampler(select) {
  $(`${select.id}-summary`).textContent = server.sampler_summaries[select.value] ?? "";
}

function useDefaults() {
  const model = modelOf($("model").value);
  $("steps").value = Math.min(model.sampling.steps, server.max_steps);
  $("steps").max = server.max_steps;
  $("temperature").value = model.sampling.temperature;
}

function setCompare(isOn) {
  $("compare").checked = isOn;
  $("second").hidden = !isOn;
  $("second").parentElement.classList.toggle("two", isOn);
  $("first-legend").textContent = isOn ? "A" : "Model and sampler";
  $("first-legend").classList.toggle("hidden-label", !isOn);
}

// Holes are marked behind the text field; it grows with its text.
function markHoles() {
  const text = $("source").value;
  let end = 0, num = 0, numHoles = 0, numOpen = 0;
  const parts = [], names = new Set();
  for (const hole of text.matchAll(HOLE)) {
    parts.push(text.slice(end, hole.index), make("mark", "", hole[0]));
    end = hole.index + hole[0].length;
    if (/^\d+$/.test(hole[1] ?? (hole[2] ? "" : "1"))) num += Number(hole[1] ?? 1);
    else numOpen += 1;
    numHoles += 1;
    if (hole[2]) names.add(hole[2]);
  }
  constraints.setNames([...names]);
  $("backdrop").replaceChildren(...parts, text.slice(end), "\u200b");
  $("counts").textContent = numHoles ? `${numHoles} ${numHoles === 1 ? "hole" : "holes"}, ${num.toLocaleString("en")} tokens${numOpen ? ` and ${numOpen} of unknown length` : ""} to fill in` : "no holes yet";
}

function setText(text) {
  $("source").value = text;
  markHoles();
}

function say(text, isError = false) {
  $("message").textContent = text;
  $("message").classList.toggle("error", isError);
}

// Scroll an element into view, above the controls at the bottom.
function scrollTo(element) {
  const block = matchMedia("(max-width: 44rem)").matches ? "start" : "nearest";
  element.scrollIntoView({ block, behavior: prefersStill() ? "auto" : "smooth" });
}

const sentence = (text) => `${text[0].toUpperCase()}${text.slice(1)}${/[.?!]$/.test(text) ? "" : "."}`;

function report(error) {
  if (error.name === "AbortError") return say("Stopped.");
  if (!(error instanceof RequestError)) throw error;
  if (error.status === 401) return askForKey();
  return say(sentence(error.message), true);
}

function askForKey() {
  $("key-form").hidden = $("show-key").hidden = false;
  say($("key").value ? "The server refuses this key; type it again." : "", true);
  $("key").select();
}

// Run one thing at a time; the button that starts it stops it, too.
async function work(isFill, action) {
  running?.abort();
  const controller = new AbortController();
  running = controller;
  isFilling = isFill;
  $("run").textContent = isFill ? "Stop" : "Fill the holes";
  $("form").classList.add("busy");
  try {
    await action(controller);
  } catch (error) {
    if (running === controller) report(error);
  } finally {
    if (running === controller) {
      running = null;
      isFilling = timeline.isGrowing = false;
      $("run").textContent = "Fill the holes";
      $("form").classList.remove("busy");
      saveState();
    }
  }
}

// ---- filling the holes

function requests() {
  const common = { text: $("source").value, steps: Number($("steps").value), temperature: Number($("temperature").value), seed: Number($("seed").value) };
  const given = constraints.toRequest();
  if (Object.keys(given).length) common.constraints = given;
  const choices = $("compare").checked ? [["model", "sampler"], ["model2", "sampler2"]] : [["model", "sampler"]];
  return choices.map(([model, sampler]) => ({ ...common, model: $(model).value, sampler: $(sampler).value }));
}

function makePane(title, detail) {
  const pane = make("article", "pane"), head = make("div", "pane-head");
  const name = make("h2", "", title), status = make("p", "pane-status"), text = make("div");
  const buttons = make("div", "pane-actions");
  head.append(name, make("p", "pane-detail", detail), status);
  text.setAttribute("role", "group");
  text.setAttribute("aria-label", `${title}: the text, token by token. Arrow keys move between tokens; comma and period step backward and forward.`);
  pane.append(head, text, buttons);
  return { pane, status, text, buttons };
}

function button(label, className, action) {
  const made = make("button", className, label);
  made.type = "button";
  made.addEventListener("click", action);
  return made;
}

function saveButton(what, action) {
  const made = button(what, "link", action);
  made.setAttribute("aria-label", `Save ${what}`);
  return made;
}

function download(name, type, content) {
  const link = make("a");
  link.href = URL.createObjectURL(new Blob([content], { type }));
  link.download = name;
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 10_000);
}

// JSON in which no character can end the data block of a page.
const ESCAPES = { "<": "\\u003c", ">": "\\u003e", "&": "\\u0026" };
const asData = (trace) => JSON.stringify(trace.data).replace(/[<>&]/g, (c) => ESCAPES[c]);

async function downloadPage(name, trace) {
  const template = await getText("/studio/trace-page.html");
  download(`${name}.html`, "text/html", template.replace("@@TRACE@@", () => asData(trace)));
}

function addActions(run) {
  const { request, trace, pane } = run, name = `adlm-${request.model.replace(/[^\w.-]+/g, "_")}-${request.sampler}-${request.seed}`;
  pane.buttons.replaceChildren(
    button("Score this text", "plain", () => score(trace.data.text)),
    make("span", "save", "Save:"),
    saveButton("text", () => download(`${name}.txt`, "text/plain", trace.data.text)),
    saveButton("trace", () => download(`${name}.json`, "application/json", JSON.stringify(trace.data))),
    saveButton("page", () => downloadPage(name, trace).catch(report)),
  );
}

// Show what has arrived: played at a pace that one can follow, or at once if motion is not wanted.
function showRuns() {
  cancelAnimationFrame(drawing);
  drawing = 0;
  const ready = runs.filter((run) => run.view);
  if (!ready.length) return;
  timeline.setViews(ready.map((run) => run.view));
  timeline.goTo(prefersStill() ? timeline.last : timeline.current);
  $("legend").replaceChildren(...legend(ready.map((run) => run.trace)));
}

// Steps may arrive faster than the screen is drawn.
let drawing = 0;
function showRunsSoon() {
  drawing ||= requestAnimationFrame(showRuns);
}

function onEvent(run, event) {
  if (event.begin) {
    run.trace = new TraceStates(event.begin);
    $("result").hidden = $("bar").hidden = false;
  } else if (event.step) {
    const { tokens, bytes, ...step } = event.step;
    run.trace.tokens.add({ tokens, bytes });
    run.trace.append(step);
    const isFirst = !runs.some((each) => each.view);
    run.view ??= new TraceText(run.pane.text, run.trace, card);
    if (!isFirst) return showRunsSoon();
    timeline.current = 0;
    showRuns();
    if (!prefersStill()) timeline.play(true);
    scrollTo($("result"));
  } else {
    const { data } = run.trace;
    Object.assign(data, { text: event.end.text, tokens: run.trace.tokens.texts, bytes: run.trace.tokens.bytes });
    data.sampling.frames = event.end.frames;
    run.trace.finish();
    addActions(run);
    showRuns();
  }
}

async function fill(step) {
  if (!$("form").reportValidity()) return;
  $("key-form").hidden = true;
  timeline.play(false);
  card.close();
  await work(true, async (controller) => {
    say("");
    const isPair = $("compare").checked;
    timeline.isGrowing = true;
    const mine = requests().map((request, number) => {
      const model = modelOf(request.model), letter = "AB"[number];
      const pane = makePane(isPair ? `${letter} · ${request.model}` : request.model, `${model.method.toUpperCase()} · ${request.sampler} · seed ${request.seed}`);
      pane.status.classList.add("of-run");
      pane.status.textContent = "waiting for its turn";
      return { request, pane };
    });
    runs = mine;
    $("panes").replaceChildren(...runs.map((run) => run.pane.pane));
    $("panes").classList.toggle("two", isPair);
    $("heat").hidden = true;
    shown = "fill";
    try {
      await Promise.all(mine.map((run) => stream("/v1/trace", run.request, controller.signal, (event) => {
        if (!controller.signal.aborted) onEvent(run, event);
      })));
    } catch (error) {
      controller.abort();   // the other pane
      if (runs === mine && !mine.some((run) => run.view)) {
        $("result").hidden = $("bar").hidden = true;
        timeline.views = [];
      }
      throw error;
    }
    if (step !== undefined) {
      timeline.play(false);
      timeline.goTo(step);
    }
    if (!matchMedia("(max-width: 44rem)").matches) scrollTo($("result"));   // the texts may have grown
  });
}

timeline.onMove = () => {
  for (const run of runs.filter((each) => each.view)) {
    const { frame, t, masked } = run.trace.status(run.view.current);
    run.pane.status.textContent = `${frame} · ${t} · ${masked}`;
  }
  if (shown === "fill" && runs.every((run) => run.trace?.isComplete)) {
    const done = runs.length > 1 ? "Both texts are complete" : "Complete";
    say(timeline.current < timeline.last ? "" : `${done}. Move the slider to go back in time, or point at a token.`);
  }
  if (!running && !timeline.timer) saveSoon();
};

// ---- the score: a bound on -log p(text)

async function score(text) {
  $("key-form").hidden = true;
  await work(false, async ({ signal }) => {
    say("Scoring the text …");
    const names = [...new Set(requests().map((request) => request.model))];
    const bounds = await Promise.all(names.map((model) => postJson("/v1/bound", { model, text }, signal)));
    const panes = bounds.map((bound) => {
      const made = makePane(bound.model, modelOf(bound.model).method.toUpperCase());
      made.status.textContent = new HeatText(made.text, bound, card).summary();
      return made.pane;
    });
    $("heat-panes").replaceChildren(...panes);
    $("heat-panes").classList.toggle("two", panes.length > 1);
    $("heat").hidden = false;
    shown = "score";
    scored = text;
    say("The score is below. Point at a token for its share.");
    scrollTo($("heat"));
  });
}

// ---- the choices of a hole

async function showChoices(name) {
  const { choice } = constraints.toRequest()[name] ?? {}, text = textAround(name);
  if (!choice) return say("Write the choices first, one a line.", true);
  if (text === null) return say("Fill the holes first: choices are compared in a text without other holes.", true);
  await work(false, async ({ signal }) => {
    say("Comparing the choices …");
    const found = await postJson("/v1/choose", { model: $("model").value, text, choices: choice, seed: Number($("seed").value) }, signal);
    constraints.showProbabilities(name, found);
    say("");
  });
}

// The text with this hole only, null if there is none yet: other holes are as they were filled last.
function textAround(name) {
  const source = $("source").value;
  if ([...source.matchAll(HOLE)].length === 1) return source;
  const { trace } = runs.find((run) => run.trace?.isComplete && run.request.text === source) ?? {};
  const hole = trace?.data.constraints?.find((each) => each.name === name);
  if (!hole || hole.starts.length > 1) return null;
  const texts = trace.finalTexts, [start] = hole.starts, end = start + hole.length;
  const text = (from, to) => texts.slice(from, to).join("");
  return `${text(0, start)}${text(start, end).startsWith(" ") ? " " : ""}[MASK]${text(end)}`;
}

// ---- the state in the address

const FIELDS = ["model", "sampler", "steps", "temperature", "seed"];

function saveState() {
  const state = new URLSearchParams({ text: $("source").value });
  for (const name of FIELDS) state.set(name, $(name).value);
  for (const word of constraints.toWords()) state.append("constraint", word);
  if ($("compare").checked) for (const name of ["model2", "sampler2"]) state.set(name, $(name).value);
  if (shown) state.set("show", shown);
  if (shown === "score" && scored !== $("source").value) state.set("scored", scored);
  if (shown === "fill" && timeline.views.length && timeline.current < timeline.last) state.set("step", timeline.current);
  history.replaceState(null, "", `#${state}`);
}

// Browsers limit how often the address may change.
let saving = 0;
function saveSoon() {
  clearTimeout(saving);
  saving = setTimeout(saveState, 200);
}

// Values that the server does not offer are left at their defaults.
function restoreState() {
  const state = new URLSearchParams(location.hash.slice(1));
  const choose = (name) => {
    const value = state.get(name);
    if (value !== null && [...$(name).options].some((option) => option.value === value)) $(name).value = value;
  };
  fillSelect($("model"), server.models.map((model) => model.name));
  fillSelect($("model2"), server.models.map((model) => model.name), server.models.at(-1).name);
  choose("model");
  choose("model2");
  fillSelect($("sampler"), [], "");
  fillSelect($("sampler2"), [], "");
  offerSamplers($("model"), $("sampler"));
  offerSamplers($("model2"), $("sampler2"));
  if (server.models.length === 1) $("sampler2").value = "remdm-cap";   // another sampler, if the only model has it
  if (!$("sampler2").value) offerSamplers($("model2"), $("sampler2"));
  choose("sampler");
  choose("sampler2");
  describeSampler($("sampler"));
  describeSampler($("sampler2"));
  useDefaults();
  $("seed").value = 0;
  for (const name of ["steps", "temperature", "seed"]) {
    const value = state.get(name);
    if (value !== null && value !== "" && Number.isFinite(Number(value))) $(name).value = Number(value);
  }
  setCompare(state.has("model2") || state.has("sampler2"));
  constraints.setWords(state.getAll("constraint"));
  setText(state.get("text") ?? EXAMPLES[modelOf($("model").value).left_to_right ? "continue" : "infill"]);
  const step = state.get("step");
  linkedStep = step === null ? undefined : Number(step) || 0;
  if (state.get("show") === "fill") say("Press “Fill the holes” to see the result of this link.");   // a link alone computes nothing
  else if (state.get("show") === "score") score(state.get("scored") ?? $("source").value);
}

// ---- events

$("form").addEventListener("submit", (event) => {
  event.preventDefault();
  if (isFilling) running.abort();
  else fill(linkedStep);
  linkedStep = undefined;
});
$("source").addEventListener("input", markHoles);
$("source").addEventListener("keydown", (event) => {
  if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) $("form").requestSubmit();
});
$("add-hole").addEventListener("click", () => {
  const field = $("source");
  field.setRangeText("[MASK*4]", field.selectionStart, field.selectionEnd, "end");
  field.focus();
  markHoles();
});
for (const each of document.querySelectorAll("[data-example]")) {
  each.addEventListener("click", () => {
    if (each.dataset.example === "form") constraints.setWords(FORM);
    setText(EXAMPLES[each.dataset.example]);
    $("source").focus();
  });
}
$("roll").addEventListener("click", () => { $("seed").value = crypto.getRandomValues(new Uint32Array(1))[0]; });
$("model").addEventListener("change", () => { offerSamplers($("model"), $("sampler")); useDefaults(); });
$("model2").addEventListener("change", () => offerSamplers($("model2"), $("sampler2")));
for (const id of ["sampler", "sampler2"]) $(id).addEventListener("change", () => describeSampler($(id)));
$("compare").addEventListener("change", () => setCompare($("compare").checked));
$("score").addEventListener("click", () => {
  const filled = runs.find((run) => run.trace?.isComplete);
  const text = $("source").value;
  const isFilled = filled && filled.request.text === text && text.search(HOLE) >= 0;
  score(isFilled ? filled.trace.data.text : text);
});
$("copy-link").addEventListener("click", async () => {
  if (server) saveState();
  try {
    await navigator.clipboard.writeText(location.href);
    say("The link is copied: it restores this text, these settings and the result.");
  } catch {
    say("The address of this page is the link: it restores this text, these settings and the result.");
  }
});
$("show-key").addEventListener("click", askForKey);
$("key-form").addEventListener("submit", (event) => {
  event.preventDefault();
  setKey($("key").value.trim());
  connect();
});
addEventListener("hashchange", () => server && restoreState());

async function connect() {
  try {
    server = await getJson("/v1/studio");
  } catch (error) {
    $("form").hidden = true;
    report(error);
    return;
  }
  $("key-form").hidden = true;
  $("form").hidden = false;
  $("key").value = "";
  say("");
  constraints.canCompare = server.choose === true;
  restoreState();
}

let chosen = null;
try { chosen = localStorage.getItem("adlm-theme"); } catch { /* storage is disabled */ }
switchTheme($("theme"), chosen, (theme) => {
  try { localStorage.setItem("adlm-theme", theme); } catch { /* storage is disabled */ }
});
listenToKeys(timeline, card);
connect();
