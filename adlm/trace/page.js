"use strict";
// Shows one trace. Its data is never taken for markup: text reaches the page by textContent alone.

const trace = JSON.parse(document.getElementById("trace").textContent);
const moments = trace.moments;
const last = moments.length - 1;
const MASK = trace.model.mask_id;
const hasAnchors = trace.model.anchor_network;
const $ = (id) => document.getElementById(id);

function make(tag, className, text) {
  const element = document.createElement(tag);
  if (className) element.className = className;
  if (text !== undefined) element.textContent = text;
  return element;
}

// ---- what happened, by moment and by place

const given = new Set(trace.given);
const states = [];   // states[k][place]: the id at moment k
const drawings = trace.canvas.map(() => []);   // drawings[place]: when a token was drawn there, and how
const maskings = trace.canvas.map(() => []);   // maskings[place]: at which moments it was masked again
moments.forEach((moment, k) => {
  const ids = k ? Int32Array.from(states[k - 1]) : Int32Array.from(trace.canvas);
  const revealed = new Set(moment.revealed);
  for (const [place, id, chance] of moment.changed) {
    ids[place] = id;
    if (revealed.has(place) && id !== MASK) {
      drawings[place].push({ k, id, chance, since: moment.anchored[place] });
    }
  }
  for (const place of moment.remasked) maskings[place].push(k);
  states.push(ids);
});
const masked = states.map((ids) => ids.reduce((sum, id) => sum + (id === MASK), 0));
const share = (k) => masked[k] / Math.max(1, trace.canvas.length);

const drawnBy = (place, k) => drawings[place].findLast((event) => event.k <= k);
const drawnAfter = (place, k) => drawings[place].find((event) => event.k > k);
const isFresh = (place, k) => drawings[place].some((event) => event.k === k);
const isAgain = (place, k) => maskings[place].includes(k);
// Whether, at moment k, the anchor network's first guess at a mask is the token that will be drawn there.
const isNamed = (next, k) => next !== undefined && next.since !== undefined && next.since <= moments[k].frame;

// ---- tokens as text

const PICTURES = { "\n": "↵", "\t": "⇥" };
const piece = (id) => trace.tokens[id] ?? `⟨${id}⟩`;
const isPart = (id) => Object.hasOwn(trace.bytes, id);
const bytesOf = (id) => isPart(id)
  ? Uint8Array.from(trace.bytes[id].match(/../g), (pair) => parseInt(pair, 16))
  : new TextEncoder().encode(piece(id));
const hex = (id) => trace.bytes[id].match(/../g).join(" ").toUpperCase();
const hidden = (character) => /[\p{Cc}\p{Cf}\u2028\u2029]/u.test(character);

// Control and format characters get a picture or their code point, so that they are seen and do nothing.
function pictured(character) {
  return PICTURES[character] ?? `⟨${character.codePointAt(0).toString(16).toUpperCase().padStart(2, "0")}⟩`;
}

const seen = (text) => Array.from(text, (c) => (hidden(c) ? pictured(c) : c)).join("");
const named = (id) => id === MASK ? "mask" : isPart(id) ? `bytes ${hex(id)}` : seen(piece(id)).replace(/^ +$/, (s) => "␣".repeat(s.length));
const trimmed = (id) => (/^\s+$/.test(piece(id)) ? named(id) : named(id).trim());

// Special tokens that the text leaves out show an empty box; the first of a run between two texts shows the blank line
// that stands for it in the text.
const leftOut = new Set(trace.hidden);
function blank(ids, place) {
  const separates = place > 0 && !leftOut.has(ids[place - 1]) && ids.slice(place).some((id) => !leftOut.has(id));
  return separates ? "\n\n" : "";
}

// A character that several tokens share is shown by the first of them; the others show that they belong to it.
function joined(ids) {
  const texts = Array.from(ids, (id, place) => (leftOut.has(id) ? blank(ids, place) : isPart(id) ? null : piece(id)));
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

const page = $("text");
const slots = trace.canvas.map((_, place) => {
  const slot = { lead: document.createTextNode(""), chip: make("span", "chip"), tail: make("span"), key: "" };
  slot.chip.dataset.place = place;
  slot.chip.tabIndex = place ? -1 : 0;
  slot.chip.setAttribute("role", "button");
  page.append(slot.lead, slot.chip, slot.tail);
  return slot;
});
const final = joined(states[last]);

// Space before a token stands outside its box; line breaks come after it. A mask is as wide as what will stand there.
function fill(slot, id, text) {
  const raw = text === null;
  const lead = raw ? "" : text.match(/^ *(?=[^ ])/)?.[0] ?? "";   // nothing but space stays in the box
  const core = raw ? "" : text.slice(lead.length);
  slot.lead.data = lead;
  slot.tail.textContent = "\n".repeat((core.match(/\n/g) || []).length);
  if (id === MASK) {
    slot.chip.dataset.ghost = raw ? hex(states[last][slot.chip.dataset.place]) : seen(core) || "‧";
    slot.chip.replaceChildren();
  } else if (raw) {
    slot.chip.replaceChildren(make("span", "raw", hex(id)));
  } else if (core === "") {
    slot.chip.replaceChildren(make("span", "mark", "‧"));
  } else {
    const parts = core.match(/[\p{Cc}\p{Cf}\u2028\u2029]+|[^\p{Cc}\p{Cf}\u2028\u2029]+/gu);
    slot.chip.replaceChildren(...parts.map((part) =>
      hidden(part[0]) ? make("span", "mark", seen(part)) : document.createTextNode(part)));
  }
}

function draw(k) {
  const ids = states[k];
  const texts = joined(ids);
  slots.forEach((slot, place) => {
    const id = ids[place], isMask = id === MASK;
    const text = isMask ? final[place] : texts[place];
    const event = isMask ? drawnAfter(place, k) : drawnBy(place, k);
    const kinds = ["chip"];
    if (isMask) kinds.push("masked");
    else kinds.push(given.has(place) ? "given" : "drawn");
    if (isMask && isNamed(event, k)) kinds.push("named");
    if (!isMask && event && event.since !== undefined) kinds.push("anchored");
    if (!isMask && isFresh(place, k)) kinds.push("fresh");
    if (isMask && isAgain(place, k)) kinds.push("again");
    if (place === looking) kinds.push("shown");
    const className = kinds.join(" ");
    if (slot.chip.className !== className) slot.chip.className = className;
    const key = `${id} ${text} ${event?.k}`;
    if (slot.key === key) return;
    slot.key = key;
    fill(slot, id, text);
    if (!isMask && event) slot.chip.style.setProperty("--sure", event.chance);
    slot.chip.setAttribute("aria-label", isMask ? `masked, place ${place + 1}` : `${named(id)}, place ${place + 1}`);
  });
}

// ---- the card

let looking = -1;   // the place whose card is open
let kept = false;   // whether it stays open when the pointer leaves

const percent = (p) => (p >= 0.9995 ? "100%" : p >= 0.0995 ? `${Math.round(p * 100)}%` : p >= 0.0005 ? `${(p * 100).toFixed(1)}%` : p > 0 ? "<0.1%" : "0%");
const at = (k) => `frame ${moments[k].frame} (t ${moments[k].t.toFixed(2)})`;
const quoted = (id) => `“${named(id).trim() || named(id)}”`;

// The predictions for a place at moment k: of a token, what it was drawn from; of a mask, those nearest in time.
function predictions(place, k) {
  if (states[k][place] !== MASK) {
    const event = drawnBy(place, k);
    return event && { k: event.k, id: event.id, note: `What it was drawn from: the state before frame ${moments[event.k].frame}.` };
  }
  const next = drawnAfter(place, k);
  const has = (j) => moments[j].denoiser[place] || moments[j].anchor[place];
  const id = next && next.id;
  for (let j = k + 1; j > 0 && j <= last; j--) {
    if (has(j)) return { k: j, id, note: j === k + 1 ? "What is expected here now." : `What was expected here after frame ${moments[j - 1].frame}.` };
    if (states[j - 1][place] !== MASK) break;
  }
  for (let j = k + 2; j <= last; j++) {
    if (has(j)) return { k: j, id, note: `What will be expected here after frame ${moments[j - 1].frame}.` };
  }
  return undefined;
}

function sentences(place, k) {
  const id = states[k][place];
  const event = id === MASK ? drawnAfter(place, k) : drawnBy(place, k);
  if (given.has(place)) return "Given: it stood on the canvas.";
  if (!event) return "Masked to the end.";
  const since = event.since === undefined ? -1 : moments.findIndex((moment) => moment.frame >= event.since);
  if (id === MASK) {
    const already = isNamed(event, k) ? ` The anchor network names it already, since frame ${event.since}.` : "";
    return `Masked. ${quoted(event.id)} will be revealed at ${at(event.k)}.${already}`;
  }
  const times = drawings[place].filter((other) => other.k <= k).length;
  const anew = times > 1 ? ` It is draw ${times} at this place.` : "";
  const ahead = since < 0 ? "" : since >= event.k - 1
    ? " The anchor network named it too."
    : ` The anchor network had named it since frame ${event.since} (t ${moments[since].t.toFixed(2)}).`;
  return `Revealed at ${at(event.k)}, with chance ${percent(event.chance)}.${ahead}${anew}`;
}

function table(title, className, guesses, chosen) {
  const box = make("div", `table ${className}`);
  box.append(make("h2", "", title));
  const list = make("ol");
  for (const [id, p] of guesses || []) {
    const row = make("li", id === chosen ? "guess chosen" : "guess");
    row.style.setProperty("--p", p);
    row.append(make("span", "word", trimmed(id)), make("span", "percent", percent(p)));
    list.append(row);
  }
  box.append(guesses ? list : make("p", "note", "not kept"));
  return box;
}

function showCard() {
  const card = $("card");
  card.hidden = looking < 0;
  if (looking < 0) return;
  const place = looking, k = now, id = states[k][place];
  const head = make("div", "head");
  const token = make("span", id === MASK ? "token none" : "token", id === MASK ? "masked" : trimmed(id));
  head.append(token, make("span", "where", `place ${place + 1}${id === MASK ? "" : ` · id ${id}`}`));
  card.replaceChildren(head, make("p", "said", sentences(place, k)));
  const found = predictions(place, k);
  if (found) {
    const tables = make("div", "tables");
    if (hasAnchors) tables.append(table("anchor network", "of-anchor", moments[found.k].anchor[place], found.id));
    tables.append(table(hasAnchors ? "denoiser" : "predictions", "of-denoiser", moments[found.k].denoiser[place], found.id));
    card.append(tables, make("p", "note", found.note));
  }
  const box = slots[place].chip.getClientRects()[0];
  if (!box) return;
  const gap = 10, width = card.offsetWidth, height = card.offsetHeight;
  if (matchMedia("(max-width: 44rem)").matches) {   // a sheet above the controls or, if there is room, at the top
    card.classList.toggle("up", box.top > height + 20);
    const over = box.bottom + gap - card.getBoundingClientRect().top;
    if (kept && over > 0 && !card.classList.contains("up")) scrollBy(0, over);
    return;
  }
  const left = Math.min(Math.max(12, box.left + box.width / 2 - width / 2), innerWidth - width - 12);
  const below = box.bottom + gap, floor = document.querySelector("footer").getBoundingClientRect().top;
  const top = below + height < floor || box.top - gap - height < 8 ? below : box.top - gap - height;
  card.style.left = `${left}px`;
  card.style.top = `${Math.max(8, Math.min(top, innerHeight - height - 8))}px`;
}

function look(place, stay) {
  if (looking >= 0) slots[looking].chip.classList.remove("shown");
  looking = place;
  kept = stay && place >= 0;
  if (place >= 0) slots[place].chip.classList.add("shown");
  showCard();
}

const placeOf = (target) => {
  const chip = target.closest?.("#text .chip");
  return chip ? Number(chip.dataset.place) : -1;
};

// ---- time

let now = 0, timer = 0;
const slider = $("time");
slider.max = last;

function go(k) {
  now = Math.max(0, Math.min(last, k));
  slider.value = now;
  draw(now);
  const moment = moments[now], left = percent(share(now));
  $("now").replaceChildren(make("b", "", `frame ${moment.frame} of ${trace.walk.frames - 1}`), `t ${moment.t.toFixed(2)} · ${left} masked`);
  slider.setAttribute("aria-valuetext", `frame ${moment.frame} of ${trace.walk.frames - 1}, time ${moment.t.toFixed(2)}, ${left} masked`);
  const x = last ? (1000 * now) / last : 0;
  $("cursor").setAttribute("x1", x);
  $("cursor").setAttribute("x2", x);
  $("past").setAttribute("d", area(0, now));
  showCard();
}

const point = (k, value) => `${(last ? (1000 * k) / last : 0).toFixed(1)} ${(96 - 92 * value).toFixed(1)}`;
function area(from, to) {
  let path = `M${point(from, 0)}`;
  for (let k = from; k <= to; k++) path += `L${point(k, share(k))}`;
  return `${path}L${point(to, 0)}Z`;
}

function play(on) {
  clearInterval(timer);
  timer = 0;
  if (on) {
    if (now === last) go(0);
    const pause = Math.max(45, Math.min(420, 14000 / Math.max(1, last))) / Number($("speed").value);
    timer = setInterval(() => (now < last ? go(now + 1) : play(false)), pause);
  }
  $("play").setAttribute("aria-label", on ? "Pause" : "Play");
  $("play-shape").setAttribute("d", on ? "M5.5 4h3.2v12H5.5zM11.3 4h3.2v12h-3.2z" : "M6 3.5v13L16.5 10z");
}

function step(by) {
  play(false);
  go(now + by);
}

slider.addEventListener("input", () => { play(false); go(Number(slider.value)); });
$("play").addEventListener("click", () => play(!timer));
$("back").addEventListener("click", () => step(-1));
$("forth").addEventListener("click", () => step(1));
$("speed").addEventListener("change", () => timer && play(true));

const scrub = (event) => {
  const box = $("chart").getBoundingClientRect();
  play(false);
  go(Math.round((last * (event.clientX - box.left)) / box.width));
};
$("chart").addEventListener("pointerdown", (event) => { $("chart").setPointerCapture(event.pointerId); scrub(event); });
$("chart").addEventListener("pointermove", (event) => event.buttons && scrub(event));

page.addEventListener("pointerover", (event) => {
  if (event.pointerType !== "touch" && !kept) look(placeOf(event.target), false);
});
page.addEventListener("pointerleave", () => kept || look(-1, false));
page.addEventListener("focusin", (event) => {
  const place = placeOf(event.target);
  slots.forEach((slot, other) => { slot.chip.tabIndex = other === place ? 0 : -1; });
  look(place, true);
});
page.addEventListener("focusout", () => look(-1, false));
addEventListener("scroll", showCard, { passive: true });
addEventListener("resize", () => { measure(); showCard(); });

addEventListener("keydown", (event) => {
  if (event.ctrlKey || event.metaKey || event.altKey) return;
  const place = placeOf(event.target);
  const inControl = event.target.matches?.("button, select, summary");
  const along = { ArrowLeft: -1, ArrowRight: 1, ArrowDown: 1, ArrowUp: -1 }[event.key];
  if (event.key === "Escape" && looking >= 0) { document.activeElement.blur(); look(-1, false); }
  else if (event.key === "," || event.key === ".") step(event.key === "," ? -1 : 1);
  else if (place >= 0 && along) slots[Math.max(0, Math.min(slots.length - 1, place + along))].chip.focus();
  else if (place >= 0 && event.key === "Home") slots[0].chip.focus();
  else if (place >= 0 && event.key === "End") slots[slots.length - 1].chip.focus();
  else if (event.key === " " && !inControl) play(!timer);
  else if (event.target === slider || event.target.matches?.("select")) return;   // they know their own keys
  else if (event.key === "ArrowLeft" || event.key === "ArrowRight") step(along);
  else if (event.key === "Home" || event.key === "End") step(event.key === "Home" ? -last : last);
  else return;
  event.preventDefault();
});

// ---- what stands around it

function legend() {
  const entry = (kinds, sample, label) => {
    const item = make("li"), chip = make("span", `chip ${kinds}`, kinds.includes("masked") ? undefined : sample);
    if (kinds.includes("masked")) chip.dataset.ghost = sample;
    chip.setAttribute("aria-hidden", "true");
    item.append(chip, label);
    $("legend").append(item);
  };
  const any = (list) => list.some((events) => events.length);
  if (given.size) entry("given", "word", "given");
  entry("masked", "word", "masked");
  if (hasAnchors) entry("masked named", "word", "masked, named by the anchor network");
  entry("drawn", "word", hasAnchors ? "drawn" : "revealed");
  if (hasAnchors) entry("drawn anchored", "word", "drawn as the anchor network named it");
  entry("drawn fresh", "word", "just now");
  if (any(maskings)) entry("masked again", "word", "masked again just now");
  const item = make("li");
  item.append(make("span", "ramp"), "chance when drawn, 0 to 1");
  $("legend").append(item);
}

function explain() {
  const paragraph = (title, text) => {
    const p = make("p");
    p.append(make("b", "", title), ` ${text}`);
    $("explained").append(p);
  };
  paragraph("The walk.", "A masked diffusion language model begins with masks and, as time t runs from 1 to 0, replaces them by tokens. The slider moves through the states in between; the curve above it is the share of masks, the broken line is t.");
  paragraph("Shade.", "The stronger a token's colour, the more probable it was when it was drawn.");
  if (hasAnchors) {
    paragraph("Anchors.", "Before the denoiser speaks, an anchor network guesses. A token is coloured as an anchor if the anchor network's first guess at its place, at the state it was drawn from, was that very token; a mask, if the first guess is already the token that will be drawn there, and stays so until then. This is what the network knew, not a proof that the guess caused the draw.");
  }
  paragraph("Cards.", `Point at a token, tap it, or move to it with the keyboard. Its card has the five likeliest tokens at the state it was drawn from; a mask's card, what is expected there now, or at the nearest moment that was kept.`);
  const merged = Math.max(...moments.map((moment) => moment.changes));
  if (merged > 1) paragraph("Merged steps.", `The walk has ${trace.walk.frames} frames. Up to ${merged} that changed something are shown as one moment.`);
}

function measure() {
  document.documentElement.style.setProperty("--bar", `${document.querySelector("footer").offsetHeight}px`);
}

const prefersDark = matchMedia("(prefers-color-scheme: dark)");
const setTheme = (dark) => { document.documentElement.dataset.theme = dark ? "dark" : "light"; };
setTheme(prefersDark.matches);
prefersDark.addEventListener("change", () => setTheme(prefersDark.matches));
$("theme").addEventListener("click", () => setTheme(document.documentElement.dataset.theme !== "dark"));

const { model, walk } = trace;
$("name").textContent = model.name;
document.title = `${model.name}: a walk`;
$("meta").textContent = [model.method.toUpperCase(), walk.sampler, `${walk.steps} steps`, walk.seed === null ? "" : `seed ${walk.seed}`, `${trace.canvas.length} tokens`].filter(Boolean).join(" · ");
legend();
explain();
$("area").setAttribute("d", area(0, last));
$("clock").setAttribute("d", `M${moments.map((moment, k) => point(k, moment.t)).join("L")}`);
measure();

// page.html#frame=40 opens at that frame and stands still; without it the walk begins to play.
const asked = /^#frame=(\d+)$/.exec(location.hash);
const first = asked ? moments.findIndex((moment) => moment.frame >= Number(asked[1])) : 0;
go(first < 0 ? last : first);
if (!asked && !matchMedia("(prefers-reduced-motion: reduce)").matches) setTimeout(() => timer || now || play(true), 700);
