"use strict";
// Shows one trace. Trace data is never interpreted as markup: it is inserted through textContent only.

const trace = JSON.parse(document.getElementById("trace").textContent);
const steps = trace.steps;
const last = steps.length - 1;
const MASK = trace.model.mask_id;
const hasAnchors = trace.model.anchor_network;
const $ = (id) => document.getElementById(id);

function make(tag, className, text) {
  const element = document.createElement(tag);
  if (className) element.className = className;
  if (text !== undefined) element.textContent = text;
  return element;
}

// ---- events, by step and by position

const given = new Set(trace.given);
const states = [];   // states[k][position]: the id after step k
const draws = trace.canvas.map(() => []);   // draws[position]: the tokens drawn there, with step and probability
const remaskings = trace.canvas.map(() => []);   // remaskings[position]: the steps in which it was remasked
steps.forEach((step, k) => {
  const ids = k ? Int32Array.from(states[k - 1]) : Int32Array.from(trace.canvas);
  const revealed = new Set(step.revealed);
  for (const [position, id, chance] of step.changed) {
    ids[position] = id;
    if (revealed.has(position) && id !== MASK) {
      draws[position].push({ k, id, chance, since: step.anchored[position] });
    }
  }
  for (const position of step.remasked) remaskings[position].push(k);
  states.push(ids);
});
const numMasked = states.map((ids) => ids.reduce((sum, id) => sum + (id === MASK), 0));
const shareMasked = (k) => numMasked[k] / Math.max(1, trace.canvas.length);

const drawnBy = (position, k) => draws[position].findLast((event) => event.k <= k);
const drawnAfter = (position, k) => draws[position].find((event) => event.k > k);
const isRevealed = (position, k) => draws[position].some((event) => event.k === k);
const isRemasked = (position, k) => remaskings[position].includes(k);
// Whether, after step k, the anchor network's top prediction at a mask is the token that will be drawn there.
const isPredicted = (next, k) => next !== undefined && next.since !== undefined && next.since <= steps[k].frame;

// ---- tokens as text

const SYMBOLS = { "\n": "↵", "\t": "⇥" };
const piece = (id) => trace.tokens[id] ?? `⟨${id}⟩`;
const isPartial = (id) => Object.hasOwn(trace.bytes, id);
const bytesOf = (id) => isPartial(id)
  ? Uint8Array.from(trace.bytes[id].match(/../g), (pair) => parseInt(pair, 16))
  : new TextEncoder().encode(piece(id));
const hex = (id) => trace.bytes[id].match(/../g).join(" ").toUpperCase();
const isInvisible = (character) => /[\p{Cc}\p{Cf}\u2028\u2029]/u.test(character);

// Control and format characters are shown as a symbol or as their code point, so that they are visible and inert.
function symbolOf(character) {
  return SYMBOLS[character] ?? `⟨${character.codePointAt(0).toString(16).toUpperCase().padStart(2, "0")}⟩`;
}

const visible = (text) => Array.from(text, (c) => (isInvisible(c) ? symbolOf(c) : c)).join("");
const label = (id) => id === MASK ? "mask" : isPartial(id) ? `bytes ${hex(id)}` : visible(piece(id)).replace(/^ +$/, (s) => "␣".repeat(s.length));
const trimmedLabel = (id) => (/^\s+$/.test(piece(id)) ? label(id) : label(id).trim());

// Hidden special tokens are empty boxes; the first one between two documents shows the blank line that separates them.
const hiddenIds = new Set(trace.hidden);
function separator(ids, position) {
  const separates = position > 0 && !hiddenIds.has(ids[position - 1]) && ids.slice(position).some((id) => !hiddenIds.has(id));
  return separates ? "\n\n" : "";
}

// A character that spans several tokens is shown at the first of them; the others show a continuation mark.
function decode(ids) {
  const texts = Array.from(ids, (id, position) => (hiddenIds.has(id) ? separator(ids, position) : isPartial(id) ? null : piece(id)));
  for (let start = 0; start < ids.length; start++) {
    if (texts[start] !== null) continue;
    let bytes = [];
    for (let end = start; end < ids.length && end < start + 8 && ids[end] !== MASK; end++) {
      bytes = bytes.concat(...bytesOf(ids[end]));
      let text;
      try {
        text = new TextDecoder("utf-8", { fatal: true, ignoreBOM: true }).decode(Uint8Array.from(bytes));
      } catch { continue; }
      texts[start] = text;
      for (let rest = start + 1; rest <= end; rest++) texts[rest] = "";
      start = end;
      break;
    }
  }
  return texts;
}

// ---- the text

const textElement = $("text");
const slots = trace.canvas.map((_, position) => {
  const slot = { lead: document.createTextNode(""), chip: make("span", "chip"), tail: make("span"), key: "" };
  slot.chip.dataset.position = position;
  slot.chip.tabIndex = position ? -1 : 0;
  slot.chip.setAttribute("role", "button");
  textElement.append(slot.lead, slot.chip, slot.tail);
  return slot;
});
const finalTexts = decode(states[last]);

// Leading spaces are outside the token's box; line breaks follow it. A mask is as wide as its final text.
function render(slot, id, text) {
  const raw = text === null;
  const lead = raw ? "" : text.match(/^ *(?=[^ ])/)?.[0] ?? "";   // a token of only spaces keeps them in its box
  const core = raw ? "" : text.slice(lead.length);
  slot.lead.data = lead;
  slot.tail.textContent = "\n".repeat((core.match(/\n/g) || []).length);
  if (id === MASK) {
    slot.chip.dataset.final = raw ? hex(states[last][slot.chip.dataset.position]) : visible(core) || "‧";
    slot.chip.replaceChildren();
  } else if (raw) {
    slot.chip.replaceChildren(make("span", "raw", hex(id)));
  } else if (core === "") {
    slot.chip.replaceChildren(make("span", "invisible", "‧"));
  } else {
    const parts = core.match(/[\p{Cc}\p{Cf}\u2028\u2029]+|[^\p{Cc}\p{Cf}\u2028\u2029]+/gu);
    slot.chip.replaceChildren(...parts.map((part) =>
      isInvisible(part[0]) ? make("span", "invisible", visible(part)) : document.createTextNode(part)));
  }
}

function draw(k) {
  const ids = states[k];
  const texts = decode(ids);
  slots.forEach((slot, position) => {
    const id = ids[position], isMask = id === MASK;
    const text = isMask ? finalTexts[position] : texts[position];
    const event = isMask ? drawnAfter(position, k) : drawnBy(position, k);
    const classes = ["chip"];
    if (isMask) classes.push("masked");
    else classes.push(given.has(position) ? "given" : "drawn");
    if (isMask && isPredicted(event, k)) classes.push("predicted");
    if (!isMask && event && event.since !== undefined) classes.push("anchored");
    if (!isMask && isRevealed(position, k)) classes.push("revealed");
    if (isMask && isRemasked(position, k)) classes.push("remasked");
    if (position === selected) classes.push("selected");
    const className = classes.join(" ");
    if (slot.chip.className !== className) slot.chip.className = className;
    const key = `${id} ${text} ${event?.k}`;
    if (slot.key === key) return;
    slot.key = key;
    render(slot, id, text);
    if (!isMask && event) slot.chip.style.setProperty("--probability", event.chance);
    slot.chip.setAttribute("aria-label", isMask ? `masked, position ${position + 1}` : `${label(id)}, position ${position + 1}`);
  });
}

// ---- the card

let selected = -1;   // the position whose card is open
let isPinned = false;   // whether the card stays open when the pointer leaves

const percent = (p) => (p >= 0.9995 ? "100%" : p >= 0.0995 ? `${Math.round(p * 100)}%` : p >= 0.0005 ? `${(p * 100).toFixed(1)}%` : p > 0 ? "<0.1%" : "0%");
const at = (k) => `frame ${steps[k].frame} (t ${steps[k].t.toFixed(2)})`;
const quoted = (id) => `“${label(id).trim() || label(id)}”`;

// The predictions for a position after step k: for a token, those it was drawn from; for a mask, the nearest stored ones.
function predictions(position, k) {
  if (states[k][position] !== MASK) {
    const event = drawnBy(position, k);
    return event && { k: event.k, id: event.id, note: `Predictions it was drawn from, before frame ${steps[event.k].frame}.` };
  }
  const next = drawnAfter(position, k);
  const has = (j) => steps[j].denoiser[position] || steps[j].anchor[position];
  const id = next && next.id;
  for (let j = k + 1; j > 0 && j <= last; j--) {
    if (has(j)) return { k: j, id, note: j === k + 1 ? "Current predictions." : `Predictions after frame ${steps[j - 1].frame}.` };
    if (states[j - 1][position] !== MASK) break;
  }
  for (let j = k + 2; j <= last; j++) {
    if (has(j)) return { k: j, id, note: `Predictions after frame ${steps[j - 1].frame}.` };
  }
  return undefined;
}

function summary(position, k) {
  const id = states[k][position];
  const event = id === MASK ? drawnAfter(position, k) : drawnBy(position, k);
  if (given.has(position)) return "Given on the canvas.";
  if (!event) return "Masked until the end.";
  const since = event.since === undefined ? -1 : steps.findIndex((step) => step.frame >= event.since);
  if (id === MASK) {
    const predicted = isPredicted(event, k) ? ` The anchor network has predicted it since frame ${event.since}.` : "";
    return `Masked. ${quoted(event.id)} will be revealed at ${at(event.k)}.${predicted}`;
  }
  const numDraws = draws[position].filter((other) => other.k <= k).length;
  const repeated = numDraws > 1 ? ` Draw ${numDraws} at this position.` : "";
  const anchored = since < 0 ? "" : since >= event.k - 1
    ? " The anchor network also predicted it."
    : ` The anchor network had predicted it since frame ${event.since} (t ${steps[since].t.toFixed(2)}).`;
  return `Revealed at ${at(event.k)}, with probability ${percent(event.chance)}.${anchored}${repeated}`;
}

function table(title, className, guesses, chosen) {
  const box = make("div", `table ${className}`);
  box.append(make("h2", "", title));
  const list = make("ol");
  for (const [id, p] of guesses || []) {
    const row = make("li", id === chosen ? "guess chosen" : "guess");
    row.style.setProperty("--p", p);
    row.append(make("span", "guess-text", trimmedLabel(id)), make("span", "percent", percent(p)));
    list.append(row);
  }
  box.append(guesses ? list : make("p", "note", "not stored"));
  return box;
}

function showCard() {
  const card = $("card");
  card.hidden = selected < 0;
  if (selected < 0) return;
  const position = selected, k = current, id = states[k][position];
  const head = make("div", "head");
  const token = make("span", id === MASK ? "token none" : "token", id === MASK ? "masked" : trimmedLabel(id));
  head.append(token, make("span", "location", `position ${position + 1}${id === MASK ? "" : ` · id ${id}`}`));
  card.replaceChildren(head, make("p", "summary", summary(position, k)));
  const found = predictions(position, k);
  if (found) {
    const tables = make("div", "tables");
    if (hasAnchors) tables.append(table("anchor network", "of-anchor", steps[found.k].anchor[position], found.id));
    tables.append(table(hasAnchors ? "denoiser" : "predictions", "of-denoiser", steps[found.k].denoiser[position], found.id));
    card.append(tables, make("p", "note", found.note));
  }
  const box = slots[position].chip.getClientRects()[0];
  if (!box) return;
  const gap = 10, width = card.offsetWidth, height = card.offsetHeight;
  if (matchMedia("(max-width: 44rem)").matches) {   // above the controls or, if there is room, at the top
    card.classList.toggle("top", box.top > height + 20);
    const over = box.bottom + gap - card.getBoundingClientRect().top;
    if (isPinned && over > 0 && !card.classList.contains("top")) scrollBy(0, over);
    return;
  }
  const left = Math.min(Math.max(12, box.left + box.width / 2 - width / 2), innerWidth - width - 12);
  const below = box.bottom + gap, floor = document.querySelector("footer").getBoundingClientRect().top;
  const top = below + height < floor || box.top - gap - height < 8 ? below : box.top - gap - height;
  card.style.left = `${left}px`;
  card.style.top = `${Math.max(8, Math.min(top, innerHeight - height - 8))}px`;
}

function select(position, pin) {
  if (selected >= 0) slots[selected].chip.classList.remove("selected");
  selected = position;
  isPinned = pin && position >= 0;
  if (position >= 0) slots[position].chip.classList.add("selected");
  showCard();
}

const positionOf = (target) => {
  const chip = target.closest?.("#text .chip");
  return chip ? Number(chip.dataset.position) : -1;
};

// ---- time

let current = 0, timer = 0;
const slider = $("time");
slider.max = last;

function goTo(k) {
  current = Math.max(0, Math.min(last, k));
  slider.value = current;
  draw(current);
  const step = steps[current], left = percent(shareMasked(current));
  $("status").replaceChildren(make("b", "", `frame ${step.frame} of ${trace.sampling.frames - 1}`), `t ${step.t.toFixed(2)} · ${left} masked`);
  slider.setAttribute("aria-valuetext", `frame ${step.frame} of ${trace.sampling.frames - 1}, time ${step.t.toFixed(2)}, ${left} masked`);
  const x = last ? (1000 * current) / last : 0;
  $("cursor").setAttribute("x1", x);
  $("cursor").setAttribute("x2", x);
  $("progress").setAttribute("d", area(0, current));
  showCard();
}

const point = (k, value) => `${(last ? (1000 * k) / last : 0).toFixed(1)} ${(96 - 92 * value).toFixed(1)}`;
function area(from, to) {
  let path = `M${point(from, 0)}`;
  for (let k = from; k <= to; k++) path += `L${point(k, shareMasked(k))}`;
  return `${path}L${point(to, 0)}Z`;
}

function play(isPlaying) {
  clearInterval(timer);
  timer = 0;
  if (isPlaying) {
    if (current === last) goTo(0);
    const pause = Math.max(45, Math.min(420, 14000 / Math.max(1, last))) / Number($("speed").value);
    timer = setInterval(() => (current < last ? goTo(current + 1) : play(false)), pause);
  }
  $("play").setAttribute("aria-label", isPlaying ? "Pause" : "Play");
  $("play-shape").setAttribute("d", isPlaying ? "M5.5 4h3.2v12H5.5zM11.3 4h3.2v12h-3.2z" : "M6 3.5v13L16.5 10z");
}

function stepBy(by) {
  play(false);
  goTo(current + by);
}

slider.addEventListener("input", () => { play(false); goTo(Number(slider.value)); });
$("play").addEventListener("click", () => play(!timer));
$("back").addEventListener("click", () => stepBy(-1));
$("forward").addEventListener("click", () => stepBy(1));
$("speed").addEventListener("change", () => timer && play(true));

const scrub = (event) => {
  const box = $("chart").getBoundingClientRect();
  play(false);
  goTo(Math.round((last * (event.clientX - box.left)) / box.width));
};
$("chart").addEventListener("pointerdown", (event) => { $("chart").setPointerCapture(event.pointerId); scrub(event); });
$("chart").addEventListener("pointermove", (event) => event.buttons && scrub(event));

textElement.addEventListener("pointerover", (event) => {
  if (event.pointerType !== "touch" && !isPinned) select(positionOf(event.target), false);
});
textElement.addEventListener("pointerleave", () => isPinned || select(-1, false));
textElement.addEventListener("focusin", (event) => {
  const position = positionOf(event.target);
  slots.forEach((slot, other) => { slot.chip.tabIndex = other === position ? 0 : -1; });
  select(position, true);
});
textElement.addEventListener("focusout", () => select(-1, false));
addEventListener("scroll", showCard, { passive: true });
addEventListener("resize", () => { setFooterHeight(); showCard(); });

addEventListener("keydown", (event) => {
  if (event.ctrlKey || event.metaKey || event.altKey) return;
  const position = positionOf(event.target);
  const inControl = event.target.matches?.("button, select, summary");
  const direction = { ArrowLeft: -1, ArrowRight: 1, ArrowDown: 1, ArrowUp: -1 }[event.key];
  if (event.key === "Escape" && selected >= 0) { document.activeElement.blur(); select(-1, false); }
  else if (event.key === "," || event.key === ".") stepBy(event.key === "," ? -1 : 1);
  else if (position >= 0 && direction) slots[Math.max(0, Math.min(slots.length - 1, position + direction))].chip.focus();
  else if (position >= 0 && event.key === "Home") slots[0].chip.focus();
  else if (position >= 0 && event.key === "End") slots[slots.length - 1].chip.focus();
  else if (event.key === " " && !inControl) play(!timer);
  else if (event.target === slider || event.target.matches?.("select")) return;   // these elements handle their own keys
  else if (event.key === "ArrowLeft" || event.key === "ArrowRight") stepBy(direction);
  else if (event.key === "Home" || event.key === "End") stepBy(event.key === "Home" ? -last : last);
  else return;
  event.preventDefault();
});

// ---- legend, explanation and header

function legend() {
  const entry = (classes, sample, caption) => {
    const item = make("li"), chip = make("span", `chip ${classes}`, classes.includes("masked") ? undefined : sample);
    if (classes.includes("masked")) chip.dataset.final = sample;
    chip.setAttribute("aria-hidden", "true");
    item.append(chip, caption);
    $("legend").append(item);
  };
  const any = (list) => list.some((events) => events.length);
  if (given.size) entry("given", "word", "given");
  entry("masked", "word", "masked");
  if (hasAnchors) entry("masked predicted", "word", "masked, already predicted by the anchor network");
  entry("drawn", "word", hasAnchors ? "drawn" : "revealed");
  if (hasAnchors) entry("drawn anchored", "word", "drawn, predicted by the anchor network");
  entry("drawn revealed", "word", "new in this step");
  if (any(remaskings)) entry("masked remasked", "word", "remasked in this step");
  const item = make("li");
  item.append(make("span", "ramp"), "probability when drawn, 0 to 1");
  $("legend").append(item);
}

function explain() {
  const paragraph = (title, text) => {
    const p = make("p");
    p.append(make("b", "", title), ` ${text}`);
    $("explanation").append(p);
  };
  paragraph("Sampling.", "A masked diffusion language model starts from masks and replaces them by tokens as the time t runs from 1 to 0. The slider moves through the intermediate states; the curve above it is the share of masked positions, the dashed line is t.");
  paragraph("Shade.", "The stronger the colour of a token, the higher its probability when it was drawn.");
  if (hasAnchors) {
    paragraph("Anchors.", "The denoiser reads the predictions of an anchor network. A token has the anchor colour if it was the anchor network's top prediction at its position in the state it was drawn from. A mask has the anchor colour if the top prediction is already the token that will be drawn there, and stays so until then. This shows what the anchor network predicted, not that the prediction caused the draw.");
  }
  paragraph("Cards.", `Point at a token, tap it, or move to it with the keyboard. Its card lists the five most probable tokens in the state it was drawn from; the card of a mask lists the current predictions, or those of the nearest stored step.`);
  const merged = Math.max(...steps.map((step) => step.changes));
  if (merged > 1) paragraph("Merged steps.", `The sampling run has ${trace.sampling.frames} frames. Up to ${merged} frames with changes are shown as one step.`);
}

function setFooterHeight() {
  document.documentElement.style.setProperty("--footer-height", `${document.querySelector("footer").offsetHeight}px`);
}

const prefersDark = matchMedia("(prefers-color-scheme: dark)");
const setTheme = (dark) => { document.documentElement.dataset.theme = dark ? "dark" : "light"; };
setTheme(prefersDark.matches);
prefersDark.addEventListener("change", () => setTheme(prefersDark.matches));
$("theme").addEventListener("click", () => setTheme(document.documentElement.dataset.theme !== "dark"));

const { model, sampling } = trace;
$("name").textContent = model.name;
document.title = `${model.name}: sampling trace`;
$("meta").textContent = [model.method.toUpperCase(), sampling.sampler, `${sampling.steps} steps`, sampling.seed === null ? "" : `seed ${sampling.seed}`, `${trace.canvas.length} tokens`].filter(Boolean).join(" · ");
legend();
explain();
$("area").setAttribute("d", area(0, last));
$("time-line").setAttribute("d", `M${steps.map((step, k) => point(k, step.t)).join("L")}`);
setFooterHeight();

// page.html#frame=40 opens paused at that frame; without it, playback starts automatically.
const requested = /^#frame=(\d+)$/.exec(location.hash);
const first = requested ? steps.findIndex((step) => step.frame >= Number(requested[1])) : 0;
goTo(first < 0 ? last : first);
if (!requested && !matchMedia("(prefers-reduced-motion: reduce)").matches) setTimeout(() => timer || current || play(true), 700);
