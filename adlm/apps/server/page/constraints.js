// The form of a template: what each named hole of the text must be filled with, and the probabilities of its choices.
import { make, percent } from "./viewer.js";

const KINDS = {
  any: { label: "anything" },
  choices: { label: "one of", hint: "one choice a line" },
  regex: { label: "regular expression", hint: "such as [0-9]{4}-[01][0-9]" },
  json: { label: "JSON by a schema", hint: '{"type": "object", "properties": {"name": {"type": "string"}}, "required": ["name"]}' },
};
const linesOf = (content) => [...new Set(content.split("\n").map((line) => line.trim()).filter(Boolean))];

export class ConstraintForm {
  // `compare(name)` is called to compare the choices of a hole.
  constructor(fieldset, rows, compare) {
    Object.assign(this, { fieldset, rows, compare, names: [], given: new Map(), outputs: new Map(), canCompare: false });
  }

  // Show a row for each name. What was given for a name is kept while it is not in the text.
  setNames(names) {
    this.fieldset.hidden = names.length === 0;
    if (names.join() === this.names.join()) return;
    this.names = names;
    this.show();
  }

  show() {
    this.outputs.clear();
    this.rows.replaceChildren(...this.names.map((name) => this.row(name)));
  }

  row(name) {
    const given = this.given.get(name) ?? { kind: "any", content: "" };
    this.given.set(name, given);
    const row = make("div", "constraint"), kind = make("select"), content = make("textarea"), output = make("div", "choices");
    for (const [value, { label }] of Object.entries(KINDS)) kind.append(new Option(label, value, false, value === given.kind));
    kind.setAttribute("aria-label", `What ${name} may be`);
    kind.id = `kind-${name}`;
    content.id = `content-${name}`;
    content.value = given.content;
    content.spellcheck = false;
    const label = make("label", "", name), button = make("button", "link", "How probable is each?");
    label.htmlFor = kind.id;
    button.type = "button";
    button.addEventListener("click", () => this.compare(name));
    const refresh = () => {
      content.hidden = given.kind === "any";
      content.rows = given.kind === "regex" ? 1 : Math.min(8, Math.max(2, content.value.split("\n").length));
      content.placeholder = KINDS[given.kind].hint ?? "";
      content.setAttribute("aria-label", `${name}: ${KINDS[given.kind].hint ?? ""}`);
      button.hidden = !this.canCompare || given.kind !== "choices";
      output.replaceChildren();
    };
    kind.addEventListener("change", () => { given.kind = kind.value; refresh(); });
    content.addEventListener("input", () => { given.content = content.value; refresh(); });
    refresh();
    row.append(label, kind, content, button, output);
    this.outputs.set(name, output);
    return row;
  }

  // The field `constraints` of a request.
  toRequest() {
    const found = {};
    for (const name of this.names) {
      const { kind, content } = this.given.get(name);
      if (kind === "any" || !content.trim()) continue;
      if (kind === "choices") found[name] = { choice: linesOf(content) };
      else found[name] = { [kind]: content };
    }
    return found;
  }

  // Constraints in a link, as `adlm sample --constrain` takes them: NAME=choices:["yes","no"].
  toWords() {
    return Object.entries(this.toRequest()).map(([name, { choice, regex, json }]) =>
      `${name}=${choice ? `choices:${JSON.stringify(choice)}` : json === undefined ? `regex:${regex}` : `json:${json}`}`);
  }

  // Words that are none are left out.
  setWords(words) {
    this.given.clear();
    for (const word of words) {
      const [, name, kind, content] = word.match(/^([A-Za-z_][A-Za-z0-9_]{0,31})=(choices|regex|json):([^]*)$/) ?? [];
      if (!name) continue;
      if (kind !== "choices") this.given.set(name, { kind, content });
      else {
        try {
          this.given.set(name, { kind, content: [].concat(JSON.parse(content)).join("\n") });
        } catch { /* no JSON */ }
      }
    }
    this.show();
  }

  // What /v1/choose answered: a bar for each choice, the most probable first.
  showProbabilities(name, { choices, probabilities, stderr }) {
    const list = make("ol");
    const order = choices.map((_, number) => number).sort((a, b) => probabilities[b] - probabilities[a]);
    for (const number of order) {
      const row = make("li", "guess"), error = stderr[number];
      row.style.setProperty("--p", probabilities[number]);
      row.append(make("span", "guess-text", choices[number]), make("span", "percent", `${percent(probabilities[number])}${error >= 0.0005 ? ` ± ${percent(error)}` : ""}`));
      list.append(row);
    }
    this.outputs.get(name)?.replaceChildren(list);
  }
}
