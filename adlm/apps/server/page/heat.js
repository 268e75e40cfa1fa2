// The score of a text as heat: one chip per token, the warmer the more it surprises the model, in nats.
import { TokenText, Tokens, cardHead, make, percent } from "./viewer.js";

export const HOTTEST = 8;   // nats of the strongest colour; the same for all texts, so that they can be compared

export class HeatText {
  constructor(element, bound, card) {
    this.bound = bound;
    this.tokens = new Tokens(bound, -1);
    this.text = new TokenText(element, this.tokens, bound.ids.length, card, (position) => this.cardOf(position));
    const texts = this.tokens.decode(bound.ids);
    bound.ids.forEach((id, position) => this.text.set(position, {
      id, text: texts[position], classes: ["heat"],
      probability: Math.min(1, Math.max(0, bound.token_nats[position]) / HOTTEST),
      label: `${this.tokens.label(id)}, ${bound.token_nats[position].toFixed(2)} nats, position ${position + 1}`,
    }));
  }

  cardOf(position) {
    const { bound } = this, nats = bound.token_nats[position], stderr = bound.token_stderr[position];
    const error = bound.exact ? "" : ` ± ${stderr.toFixed(2)}`;
    const title = this.tokens.hidden.has(bound.ids[position]) ? this.tokens.piece(bound.ids[position]) : this.tokens.trimmedLabel(bound.ids[position]);
    const sense = bound.exact
      ? `The model gives it probability ${percent(Math.exp(-nats))} after the tokens before it.`
      : "Its share of an upper bound on the surprise of the text (−log of its probability), averaged over random masks.";
    return [
      cardHead(title, false, `position ${position + 1} · id ${bound.ids[position]}`),
      make("p", "summary", `Surprise ${nats.toFixed(2)}${error} nats. ${sense}`),
    ];
  }

  summary() {
    const { bound } = this;
    const sign = bound.exact ? "" : "≤ ";
    const error = bound.exact ? "" : ` ± ${(bound.nats_stderr / bound.num_tokens).toFixed(2)}`;
    return `surprise ${sign}${bound.nats_per_token.toFixed(2)}${error} nats per token · perplexity ${sign}${Number(bound.perplexity.toPrecision(4)).toLocaleString("en")} · ${bound.num_tokens} tokens`;
  }
}
