// Components of the trace page and the studio: tokens as text, the states of a trace, chips, card, timeline and keys.
// Data is never interpreted as markup: it is inserted through textContent only.

export function make(tag, className, text) {
  const element = document.createElement(tag);
  if (className) element.className = className;
  if (text !== undefined) element.textContent = text;
  return element;
}

function makeSvg(tag, attributes = {}) {
  const element = document.createElementNS(document.querySelector("svg").namespaceURI, tag);   // of the theme button
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  return element;
}

export const percent = (p) => (p >= 0.9995 ? "100%" : p >= 0.0995 ? `${Math.round(p * 100)}%` : p >= 0.0005 ? `${(p * 100).toFixed(1)}%` : p > 0 ? "<0.1%" : "0%");

// A probability that may be tiny, by its logarithm to the base 10: 4.2%, 3·10⁻⁷.
const SUPERSCRIPTS = "⁰¹²³⁴⁵⁶⁷⁸⁹";
function small(p, log10) {
  if (p >= 1e-3) return percent(p);
  const exponent = Math.floor(log10), digits = String(-exponent).replace(/\d/g, (digit) => SUPERSCRIPTS[digit]);
  return `${Math.max(1, Math.floor(10 ** (log10 - exponent)))}·10⁻${digits}`;
}

// ---- tokens as text

const SYMBOLS = { "\n": "↵", "\t": "⇥" };
const isInvisible = (character) => /[\p{Cc}\p{Cf}\u2028\u2029]/u.test(character);

// Control and format characters are shown as a symbol or as their code point, so that they are visible and inert.
function symbolOf(character) {
  return SYMBOLS[character] ?? `⟨${character.codePointAt(0).toString(16).toUpperCase().padStart(2, "0")}⟩`;
}

const visible = (text) => Array.from(text, (c) => (isInvisible(c) ? symbolOf(c) : c)).join("");

// The texts of ids: the fields `tokens`, `bytes`, `hidden` and `open` of a trace.
export class Tokens {
  constructor({ tokens, bytes, hidden, open }, maskId) {
    this.texts = { ...tokens };
    this.bytes = { ...bytes };
    this.hidden = new Set(hidden);
    this.open = new Set(open);
    this.maskId = maskId;
  }

  add({ tokens, bytes }) {
    Object.assign(this.texts, tokens);
    Object.assign(this.bytes, bytes);
  }

  piece(id) { return this.texts[id] ?? `⟨${id}⟩`; }
  isPartial(id) { return Object.hasOwn(this.bytes, id); }
  hex(id) { return this.bytes[id].match(/../g).join(" ").toUpperCase(); }

  bytesOf(id) {
    return this.isPartial(id)
      ? Uint8Array.from(this.bytes[id].match(/../g), (pair) => parseInt(pair, 16))
      : new TextEncoder().encode(this.piece(id));
  }

  label(id) {
    if (id === this.maskId) return "mask";
    return this.isPartial(id) ? `bytes ${this.hex(id)}` : visible(this.piece(id)).replace(/^ +$/, (s) => "␣".repeat(s.length));
  }

  trimmedLabel(id) { return /^\s+$/.test(this.piece(id)) ? this.label(id) : this.label(id).trim(); }
  quoted(id) { return `“${this.label(id).trim() || this.label(id)}”`; }

  // Hidden special tokens have no text and are shown as a dot; the first one between two documents shows the blank line that separates them.
  separator(ids, position) {
    const separates = !this.open.has(position) && position > 0 && !this.hidden.has(ids[position - 1]) && ids.slice(position).some((id) => !this.hidden.has(id));
    return separates ? "\n\n" : "";
  }

  // The text of each token. A character that spans several tokens is at the first of them, "" at the others; null is
  // a token whose bytes are not a character.
  decode(ids) {
    const texts = Array.from(ids, (id, position) => (this.hidden.has(id) ? this.separator(ids, position) : this.isPartial(id) ? null : this.piece(id)));
    for (let start = 0; start < ids.length; start++) {
      if (texts[start] !== null) continue;
      let bytes = [];
      for (let end = start; end < ids.length && end < start + 8 && ids[end] !== this.maskId; end++) {
        bytes = bytes.concat(...this.bytesOf(ids[end]));
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
}

// ---- the states of a trace

// A trace, complete or still being sampled: events by step and by position.
export class TraceStates {
  constructor(data) {
    this.data = { ...data, steps: [] };
    this.tokens = new Tokens(data, data.model.mask_id);
    this.maskId = data.model.mask_id;
    this.hasAnchors = data.model.anchor_network;
    this.given = new Set(data.given);
    this.steps = this.data.steps;
    this.states = [];   // states[k][position]: the id after step k
    this.numMasked = [];
    this.draws = data.canvas.map(() => []);   // draws[position]: the tokens drawn there, with step and probability
    this.remaskings = data.canvas.map(() => []);   // remaskings[position]: the steps in which it was remasked
    this.isComplete = false;
    this.finalTexts = null;
    for (const step of data.steps ?? []) this.append(step);
    if (data.steps) this.finish();
  }

  get last() { return this.steps.length - 1; }
  get length() { return this.data.canvas.length; }

  append(step) {
    const k = this.steps.length;
    const ids = Int32Array.from(k ? this.states[k - 1] : this.data.canvas);
    const revealed = new Set(step.revealed);
    for (const [position, id, chance] of step.changed) {
      ids[position] = id;
      if (revealed.has(position) && id !== this.maskId) {
        this.draws[position].push({ k, id, chance, since: step.anchored[position] });
      }
    }
    for (const position of step.remasked) this.remaskings[position].push(k);
    this.steps.push(step);
    this.states.push(ids);
    this.numMasked.push(ids.reduce((sum, id) => sum + (id === this.maskId), 0));
  }

  finish() {
    this.isComplete = true;
    this.finalTexts = this.tokens.decode(this.states[this.last]);
  }

  shareMasked(k) { return this.numMasked[k] / Math.max(1, this.length); }
  drawnBy(position, k) { return this.draws[position].findLast((event) => event.k <= k); }
  drawnAfter(position, k) { return this.draws[position].find((event) => event.k > k); }
  isRevealed(position, k) { return this.draws[position].some((event) => event.k === k); }
  isRemasked(position, k) { return this.remaskings[position].includes(k); }
  get remasks() { return this.remaskings.some((events) => events.length); }

  // Whether, after step k, the anchor network's top prediction at a mask is the token that will be drawn there.
  isPredicted(next, k) { return next !== undefined && next.since !== undefined && next.since <= this.steps[k].frame; }

  // The predictions for a position after step k: for a token, those it was drawn from; for a mask, the nearest stored ones.
  predictions(position, k) {
    const { steps, states, last } = this;
    if (states[k][position] !== this.maskId) {
      const event = this.drawnBy(position, k);
      return event && { k: event.k, id: event.id, note: `Predictions it was drawn from, before frame ${steps[event.k].frame}.` };
    }
    const next = this.drawnAfter(position, k);
    const has = (j) => steps[j].denoiser[position] || steps[j].anchor[position];
    const id = next && next.id;
    for (let j = Math.min(k + 1, last); j > 0; j--) {
      if (has(j)) return { k: j, id, note: j === k + 1 ? "Current predictions." : `Predictions after frame ${steps[j - 1].frame}.` };
      if (states[j - 1][position] !== this.maskId) break;
    }
    for (let j = k + 2; j <= last; j++) {
      if (has(j)) return { k: j, id, note: `Predictions after frame ${steps[j - 1].frame}.` };
    }
    return undefined;
  }

  // What the constraint of a hole leaves of the probability in step k.
  massAt(position, k) {
    const number = (this.data.constraints ?? []).findIndex(({ starts, length }) => starts.some((start) => start <= position && position < start + length));
    const logMass = this.steps[k].log_mass?.[number];
    if (logMass === undefined) return undefined;
    const { name } = this.data.constraints[number];
    return `Independent draws at the masks of ${name ? `“${name}”` : "this hole"} would satisfy its constraint with probability ${small(Math.exp(logMass), logMass / Math.LN10)}.`;
  }

  at(k) { return `frame ${this.steps[k].frame} (t ${this.steps[k].t.toFixed(2)})`; }

  summary(position, k) {
    const id = this.states[k][position], isMask = id === this.maskId;
    const event = isMask ? this.drawnAfter(position, k) : this.drawnBy(position, k);
    if (this.given.has(position)) {
      return position === 0 && this.tokens.hidden.has(id)
        ? "The start token (bos): texts begin with it in training, so the given text is read after it. It is not part of the result."
        : "Part of the given text: it stays as it is.";
    }
    if (!event) return this.isComplete ? "Masked until the end." : "Masked.";
    const since = event.since === undefined ? -1 : this.steps.findIndex((step) => step.frame >= event.since);
    if (isMask) {
      const predicted = this.isPredicted(event, k) ? ` The anchor network has predicted it since frame ${event.since}.` : "";
      return `Masked. ${this.tokens.quoted(event.id)} will be revealed at ${this.at(event.k)}.${predicted}`;
    }
    const numDraws = this.draws[position].filter((other) => other.k <= k).length;
    const repeated = numDraws > 1 ? ` Draw ${numDraws} at this position.` : "";
    const anchored = since < 0 ? "" : since >= event.k - 1
      ? " The anchor network also predicted it."
      : ` The anchor network had predicted it since frame ${event.since} (t ${this.steps[since].t.toFixed(2)}).`;
    return `Revealed at ${this.at(event.k)}, with probability ${percent(event.chance)}.${anchored}${repeated}`;
  }

  status(k) {
    const step = this.steps[k], of = this.isComplete ? ` of ${this.data.sampling.frames - 1}` : "";
    return { frame: `frame ${step.frame}${of}`, t: `t ${step.t.toFixed(2)}`, masked: `${percent(this.shareMasked(k))} masked` };
  }
}

// ---- the text

const UNKNOWN = " ····";   // stands for a token that is not drawn yet, in a run that is still being sampled

// The chips of a row of tokens. `fillCard(position)` returns the nodes of a token's card.
export class TokenText {
  constructor(element, tokens, length, card, fillCard) {
    Object.assign(this, { element, tokens, card, fillCard });
    element.classList.add("token-text");
    this.slots = Array.from({ length }, (_, position) => {
      const slot = { lead: document.createTextNode(""), chip: make("span", "chip"), tail: make("span"), key: "", position };
      slot.chip.dataset.position = position;
      slot.chip.tabIndex = position ? -1 : 0;
      slot.chip.setAttribute("role", "button");
      return slot;
    });
    element.replaceChildren(...this.slots.flatMap((slot) => [slot.lead, slot.chip, slot.tail]));
    this.listeners = new AbortController();
    const on = (name, listener) => element.addEventListener(name, listener, { signal: this.listeners.signal });
    on("pointerover", (event) => {
      if (event.pointerType !== "touch" && !card.isPinned) card.open(this, this.positionOf(event.target), false);
    });
    on("pointerleave", () => card.isPinned || card.close());
    on("focusin", (event) => {
      const position = this.positionOf(event.target);
      this.slots.forEach((slot, other) => { slot.chip.tabIndex = other === position ? 0 : -1; });
      card.open(this, position, true);
    });
    on("focusout", () => card.close());
    on("keydown", (event) => {
      const direction = { ArrowLeft: -1, ArrowRight: 1, ArrowDown: 1, ArrowUp: -1, Home: -length, End: length }[event.key];
      const position = this.positionOf(event.target);
      if (!direction || position < 0 || event.ctrlKey || event.metaKey || event.altKey) return;
      this.slots[Math.max(0, Math.min(length - 1, position + direction))].chip.focus();
      event.preventDefault();
      event.stopPropagation();
    });
  }

  remove() {
    if (this.card.text === this) this.card.close();
    this.listeners.abort();
    this.element.replaceChildren();
  }

  positionOf(target) {
    const chip = target.closest?.(".chip");
    return chip && this.element.contains(chip) ? Number(chip.dataset.position) : -1;
  }

  // Leading spaces are outside the token's box; line breaks follow it. A mask is as wide as its text, which is hidden.
  set(position, { id, text, hiddenHex, classes, probability, label }) {
    const slot = this.slots[position], isMask = id === this.tokens.maskId;
    const className = ["chip", ...classes, ...(this.card.isOpenAt(this, position) ? ["selected"] : [])].join(" ");
    if (slot.chip.className !== className) slot.chip.className = className;
    const key = `${id} ${text} ${probability}`;
    if (slot.key === key) return;
    slot.key = key;
    const raw = text === null;
    const lead = raw ? "" : text.match(/^ *(?=[^ ])/)?.[0] ?? "";   // a token of only spaces keeps them in its box
    const core = raw ? "" : text.slice(lead.length);
    slot.lead.data = lead;
    slot.tail.textContent = "\n".repeat((core.match(/\n/g) || []).length);
    if (isMask) {
      slot.chip.dataset.final = raw ? hiddenHex : visible(core) || "‧";
      slot.chip.replaceChildren();
    } else if (raw) {
      slot.chip.replaceChildren(make("span", "raw", this.tokens.hex(id)));
    } else if (core === "") {
      slot.chip.replaceChildren(make("span", "invisible", "‧"));
    } else {
      const parts = core.match(/[\p{Cc}\p{Cf}\u2028\u2029]+|[^\p{Cc}\p{Cf}\u2028\u2029]+/gu);
      slot.chip.replaceChildren(...parts.map((part) =>
        isInvisible(part[0]) ? make("span", "invisible", visible(part)) : document.createTextNode(part)));
    }
    if (probability !== undefined) slot.chip.style.setProperty("--probability", probability);
    slot.chip.setAttribute("aria-label", label);
  }
}

// One trace as text: `show(k)` draws the state after step k.
export class TraceText {
  constructor(element, trace, card) {
    Object.assign(this, { trace, current: 0 });
    this.text = new TokenText(element, trace.tokens, trace.length, card, (position) => this.cardOf(position));
  }

  show(k) {
    const { trace } = this;
    this.current = Math.max(0, Math.min(trace.last, k));
    k = this.current;
    const ids = trace.states[k], texts = trace.tokens.decode(ids);
    for (let position = 0; position < trace.length; position++) {
      const id = ids[position], isMask = id === trace.maskId;
      const event = isMask ? trace.drawnAfter(position, k) : trace.drawnBy(position, k);
      const classes = [];
      if (isMask) classes.push("masked");
      else classes.push(trace.given.has(position) ? "given" : "drawn");
      if (trace.tokens.open.has(position) && trace.tokens.hidden.has(id)) classes.push("left-out");   // after the end of a hole
      if (isMask && trace.isPredicted(event, k)) classes.push("predicted");
      if (!isMask && event && event.since !== undefined) classes.push("anchored");
      if (!isMask && trace.isRevealed(position, k)) classes.push("revealed");
      if (isMask && trace.isRemasked(position, k)) classes.push("remasked");
      const unknown = isMask && !trace.isComplete;
      this.text.set(position, {
        id, classes,
        text: !isMask ? texts[position] : unknown ? UNKNOWN : trace.finalTexts[position],
        hiddenHex: isMask && !unknown && trace.finalTexts[position] === null ? trace.tokens.hex(trace.states[trace.last][position]) : "",
        probability: isMask ? undefined : event?.chance,
        label: isMask ? `masked, position ${position + 1}` : `${trace.tokens.label(id)}, position ${position + 1}`,
      });
    }
    this.text.card.refresh(this.text);
  }

  cardOf(position) {
    const { trace, current: k } = this, id = trace.states[k][position], isMask = id === trace.maskId;
    const head = cardHead(isMask ? "masked" : trace.tokens.trimmedLabel(id), isMask, `position ${position + 1}${isMask ? "" : ` · id ${id}`}`);
    const nodes = [head, make("p", "summary", trace.summary(position, k))];
    const found = trace.predictions(position, k);
    if (found) {
      const tables = make("div", "tables"), step = trace.steps[found.k], mass = trace.massAt(position, found.k);
      if (trace.hasAnchors) tables.append(this.table("anchor network", "of-anchor", step.anchor[position], found.id));
      tables.append(this.table(trace.hasAnchors ? "denoiser" : "predictions", "of-denoiser", step.denoiser[position], found.id));
      if (step.conditioned?.[position]) tables.append(this.table("given the constraint", "of-constraint", step.conditioned[position], found.id));
      if (mass !== undefined) nodes.push(make("p", "note", mass));
      nodes.push(tables, make("p", "note", found.note));
    }
    return nodes;
  }

  table(title, className, guesses, chosen) {
    const box = make("div", `table ${className}`);
    box.append(make("p", "network", title));
    const list = make("ol");
    for (const [id, p] of guesses || []) {
      const row = make("li", id === chosen ? "guess chosen" : "guess");
      row.style.setProperty("--p", p);
      row.append(make("span", "guess-text", this.trace.tokens.trimmedLabel(id)), make("span", "percent", percent(p)));
      list.append(row);
    }
    box.append(guesses ? list : make("p", "note", "not stored"));
    return box;
  }
}

// ---- the card

export function cardHead(title, isMask, location) {
  const head = make("div", "head");
  head.append(make("span", isMask ? "token none" : "token", title), make("span", "location", location));
  return head;
}

// The card of one token at a time, of any text on the page. A pinned card stays open when the pointer leaves.
export class Card {
  constructor(element, floor) {
    Object.assign(this, { element, floor, text: null, position: -1, isPinned: false });
    addEventListener("scroll", () => this.refresh(), { passive: true });
    addEventListener("resize", () => this.refresh());
  }

  isOpenAt(text, position) { return this.text === text && this.position === position; }

  open(text, position, pin) {
    this.close();
    if (position < 0) return;
    Object.assign(this, { text, position, isPinned: pin });
    text.slots[position].chip.classList.add("selected");
    this.refresh();
  }

  close() {
    this.text?.slots[this.position]?.chip.classList.remove("selected");
    Object.assign(this, { text: null, position: -1, isPinned: false });
    this.element.hidden = true;
  }

  refresh(text = this.text) {
    if (this.text === null || text !== this.text) return;
    this.element.hidden = false;
    this.element.replaceChildren(...this.text.fillCard(this.position));
    const box = this.text.slots[this.position].chip.getClientRects()[0];
    if (box) this.place(box);
  }

  place(box) {
    const card = this.element, gap = 10, width = card.offsetWidth, height = card.offsetHeight;
    if (matchMedia("(max-width: 44rem)").matches) {   // above the controls or, if there is room, at the top
      card.classList.toggle("top", box.top > height + 20);
      const over = box.bottom + gap - card.getBoundingClientRect().top;
      if (this.isPinned && over > 0 && !card.classList.contains("top")) scrollBy(0, over);
      return;
    }
    const left = Math.min(Math.max(12, box.left + box.width / 2 - width / 2), innerWidth - width - 12);
    const below = box.bottom + gap, floor = this.floor.hidden ? innerHeight : this.floor.getBoundingClientRect().top;
    const top = below + height < floor || box.top - gap - height < 8 ? below : box.top - gap - height;
    card.style.left = `${left}px`;
    card.style.top = `${Math.max(8, Math.min(top, innerHeight - height - 8))}px`;
  }
}

// ---- time

const PLAY = "M6 3.5v13L16.5 10z", PAUSE = "M5.5 4h3.2v12H5.5zM11.3 4h3.2v12h-3.2z";
const SPEEDS = { 0.25: "¼×", 0.5: "½×", 1: "1×", 2: "2×", 4: "4×" };

function iconButton(id, label, shape, className = "quiet") {
  const button = make("button", className);
  button.id = id;
  button.type = "button";
  button.setAttribute("aria-label", label);
  const icon = makeSvg("svg", { viewBox: "0 0 20 20", "aria-hidden": "true" });
  icon.append(makeSvg("path", { d: shape }));
  button.append(icon);
  return button;
}

// Slider, chart and buttons of one or two traces. The slider counts the steps of the longer one; the other moves along.
// `longestPause` is the time between two steps of a short trace, in ms. While traces grow (`isGrowing`), playback waits at the last step for the next one.
export class Timeline {
  constructor(element, longestPause = 420) {
    Object.assign(this, { element, longestPause, views: [], current: 0, timer: 0, isGrowing: false, onMove: () => {} });
    const timeline = make("div", "timeline"), controls = make("div", "controls");
    this.chart = makeSvg("svg", { id: "chart", "aria-hidden": "true", preserveAspectRatio: "none", viewBox: "0 0 1000 100" });
    this.paths = Object.fromEntries(["area", "progress", "other", "time-line"].map((id) => [id, makeSvg("path", { id })]));
    this.cursor = makeSvg("line", { id: "cursor", y1: 0, y2: 100 });
    this.chart.append(...Object.values(this.paths), this.cursor);
    const key = make("div", "key");
    key.setAttribute("aria-hidden", "true");
    this.otherKey = make("span", "other-key", "B");
    key.append(make("span", "masked-key", "masked"), this.otherKey, make("span", "time-key", "time t"));
    this.slider = make("input");
    Object.assign(this.slider, { id: "time", type: "range", min: 0, value: 0, step: 1 });
    this.slider.setAttribute("aria-label", "Sampling step");
    timeline.append(this.chart, key, this.slider);
    this.playButton = iconButton("play", "Play", PLAY, "main");
    const back = iconButton("back", "Previous step", "M13 4.5v11L6 10z"), forward = iconButton("forward", "Next step", "M7 4.5v11l7-5.5z");
    this.status = make("output");
    this.status.id = "status";
    this.status.htmlFor = "time";
    this.speed = make("select");
    this.speed.id = "speed";
    this.speed.setAttribute("aria-label", "Speed");
    for (const [value, text] of Object.entries(SPEEDS)) this.speed.append(new Option(text, value, value === "1", value === "1"));
    const keys = make("p", "keys");
    for (const [names, action] of [[["space"], "play"], [["←", "→"], "step"], [["tab"], "text"]]) {
      keys.append(...names.map((name) => make("kbd", "", name)), ` ${action} `);
    }
    controls.append(back, this.playButton, forward, this.status, this.speed, keys);
    element.append(timeline, controls);
    this.slider.addEventListener("input", () => { this.play(false); this.goTo(Number(this.slider.value)); });
    this.playButton.addEventListener("click", () => this.play(!this.timer));
    back.addEventListener("click", () => this.stepBy(-1));
    forward.addEventListener("click", () => this.stepBy(1));
    this.speed.addEventListener("change", () => this.timer && this.play(true));
    const scrub = (event) => {
      const box = this.chart.getBoundingClientRect();
      this.play(false);
      this.goTo(Math.round((this.last * (event.clientX - box.left)) / box.width));
    };
    this.chart.addEventListener("pointerdown", (event) => { this.chart.setPointerCapture(event.pointerId); scrub(event); });
    this.chart.addEventListener("pointermove", (event) => event.buttons && scrub(event));
    new ResizeObserver(() => document.documentElement.style.setProperty("--footer-height", `${element.offsetHeight}px`)).observe(element);
  }

  get last() { return Math.max(0, ...this.views.map((view) => view.trace.last)); }

  // Show these views; call it again after a trace has grown.
  setViews(views) {
    this.views = views;
    this.slider.max = this.last;
    const [first, second] = views.map((view) => view.trace);
    this.paths.area.setAttribute("d", this.area(first, first.last));
    this.paths["time-line"].setAttribute("d", `M${first.steps.map((step, k) => this.point(first, k, step.t)).join("L")}`);
    this.paths.other.setAttribute("d", second ? `M${second.steps.map((_, k) => this.point(second, k, second.shareMasked(k))).join("L")}` : "");
    this.otherKey.hidden = !second;
  }

  stepOf(view, k) { return this.last ? Math.round((k * view.trace.last) / this.last) : 0; }

  goTo(k) {
    this.current = Math.max(0, Math.min(this.last, k));
    this.slider.value = this.current;
    for (const view of this.views) view.show(this.stepOf(view, this.current));
    const [first] = this.views, step = this.stepOf(first, this.current), status = first.trace.status(step);
    if (this.views.length === 1) this.status.replaceChildren(make("b", "", status.frame), `${status.t} · ${status.masked}`);
    else this.status.replaceChildren(make("b", "", `step ${this.current} of ${this.last}`), "A and B together");
    this.slider.setAttribute("aria-valuetext", `${status.frame}, time ${first.trace.steps[step].t.toFixed(2)}, ${status.masked}`);
    const x = this.last ? (1000 * this.current) / this.last : 0;
    this.cursor.setAttribute("x1", x);
    this.cursor.setAttribute("x2", x);
    this.paths.progress.setAttribute("d", this.area(first.trace, step));
    this.onMove(this.current);
  }

  point(trace, k, value) { return `${(trace.last ? (1000 * k) / trace.last : 0).toFixed(1)} ${(96 - 92 * value).toFixed(1)}`; }

  area(trace, to) {
    let path = `M${this.point(trace, 0, 0)}`;
    for (let k = 0; k <= to; k++) path += `L${this.point(trace, k, trace.shareMasked(k))}`;
    return `${path}L${this.point(trace, to, 0)}Z`;
  }

  play(isPlaying) {
    clearTimeout(this.timer);
    this.timer = 0;
    if (isPlaying) {
      if (this.current === this.last && !this.isGrowing) this.goTo(0);
      this.schedule();
    }
    this.playButton.setAttribute("aria-label", isPlaying ? "Pause" : "Play");
    this.playButton.querySelector("path").setAttribute("d", isPlaying ? PAUSE : PLAY);
  }

  schedule() {
    const pause = Math.max(45, Math.min(this.longestPause, 14000 / Math.max(1, this.last))) / Number(this.speed.value);
    this.timer = setTimeout(() => {
      if (this.current < this.last) this.goTo(this.current + 1);
      if (this.current < this.last || this.isGrowing) this.schedule();
      else this.play(false);
    }, pause);
  }

  stepBy(by) {
    this.play(false);
    this.goTo(this.current + by);
  }
}

// The keys of the page. Text fields keep all of theirs, other controls their own.
export function listenToKeys(timeline, card) {
  addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey || event.defaultPrevented) return;
    if (event.key === "Escape" && card.text) { document.activeElement.blur(); card.close(); event.preventDefault(); return; }
    const is = (selector) => event.target.matches?.(selector) ?? false;
    if (!timeline.views.length || is("textarea, input:not([type=range]), dialog *")) return;
    if (event.key === "," || event.key === ".") timeline.stepBy(event.key === "," ? -1 : 1);
    else if (event.key === " " && !is("button, select, summary, a")) timeline.play(!timeline.timer);
    else if (is("input, select")) return;   // these elements handle their own keys
    else if (event.key === "ArrowLeft" || event.key === "ArrowRight") timeline.stepBy(event.key === "ArrowLeft" ? -1 : 1);
    else if (event.key === "Home" || event.key === "End") timeline.stepBy(event.key === "Home" ? -timeline.last : timeline.last);
    else return;
    event.preventDefault();
  });
}

// ---- legend and theme

function legendEntry(classes, caption) {
  const item = make("li"), chip = make("span", `chip ${classes}`, classes.includes("masked") ? undefined : "word");
  if (classes.includes("masked")) chip.dataset.final = "word";
  chip.setAttribute("aria-hidden", "true");
  item.append(chip, caption);
  return item;
}

export function ramp(className, caption) {
  const item = make("li");
  item.append(make("span", `ramp ${className}`), caption);
  return item;
}

// The entries for what occurs in these traces.
export function legend(traces) {
  const anchors = traces.some((trace) => trace.hasAnchors);
  return [
    ...(traces.some((trace) => trace.given.size) ? [legendEntry("given", "given text")] : []),
    legendEntry("masked", "masked"),
    ...(anchors ? [legendEntry("masked predicted", "masked, already predicted by the anchor network")] : []),
    legendEntry("drawn", anchors ? "drawn" : "revealed"),
    ...(anchors ? [legendEntry("drawn anchored", "drawn, predicted by the anchor network")] : []),
    legendEntry("drawn revealed", "new in this step"),
    ...(traces.some((trace) => trace.remasks) ? [legendEntry("masked remasked", "remasked in this step")] : []),
    ramp("of-probability", "probability when drawn, 0 to 1"),
  ];
}

// The button switches the theme, which follows the system until then; `remember(theme)` is called with the choice.
export function switchTheme(button, chosen = null, remember = () => {}) {
  const prefersDark = matchMedia("(prefers-color-scheme: dark)");
  const set = (dark) => { document.documentElement.dataset.theme = dark ? "dark" : "light"; };
  set(chosen === null ? prefersDark.matches : chosen === "dark");
  prefersDark.addEventListener("change", () => chosen === null && set(prefersDark.matches));
  button.addEventListener("click", () => {
    set(document.documentElement.dataset.theme !== "dark");
    chosen = document.documentElement.dataset.theme;
    remember(chosen);
  });
}
