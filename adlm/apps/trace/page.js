// The trace page: one trace, from the data block of the page.
import { Card, Timeline, TraceStates, TraceText, legend, listenToKeys, make, switchTheme } from "./viewer.js";

const $ = (id) => document.getElementById(id);
const data = JSON.parse($("trace").textContent);
const trace = new TraceStates(data);
const timeline = new Timeline($("bar")), card = new Card($("card"), $("bar"));
const view = new TraceText($("text"), trace, card);
const { model, sampling } = data, numFrames = sampling.frames - 1;   // after the canvas

function explain() {
  const paragraph = (title, text) => {
    const p = make("p");
    p.append(make("b", "", title), ` ${text}`);
    $("explanation").append(p);
  };
  paragraph("Sampling.", "A masked diffusion language model starts from masks and replaces them by tokens as the time t runs from 1 to 0. The slider moves through the intermediate states; the curve above it is the share of masked positions, the dashed line is t.");
  paragraph("Shade.", "The stronger the colour of a token, the higher its probability when it was drawn.");
  if (trace.hasAnchors) {
    paragraph("Anchors.", "The denoiser reads the predictions of an anchor network. A token has the anchor colour if it was the anchor network's top prediction at its position in the state it was drawn from. A mask has the anchor colour if the top prediction is already the token that will be drawn there, and stays so until then. This shows what the anchor network predicted, not that the prediction caused the draw.");
  }
  paragraph("Cards.", "Point at a token, tap it, or move to it with the keyboard. Its card lists the five most probable tokens in the state it was drawn from; the card of a mask lists the current predictions, or those of the nearest stored step.");
  if (numFrames < sampling.steps) paragraph("Frames.", `The sampler took ${sampling.steps} steps. A step that reveals no token makes no frame, so there are ${numFrames} frames after the first, the masks.`);
  paragraph("Dots.", "A small dot is a token without a text of its own: the start token (bos), after which a text is read as in training, the end of a text (eos), or the rest of a character of several tokens. Its card names it.");
  const merged = Math.max(...trace.steps.map((step) => step.changes));
  if (merged > 1) paragraph("Merged steps.", `The sampling run has ${data.sampling.frames} frames. Up to ${merged} frames with changes are shown as one step.`);
}

switchTheme($("theme"));
$("name").textContent = model.name;
document.title = `${model.name}: sampling trace`;
$("meta").textContent = [model.method.toUpperCase(), sampling.sampler, numFrames < sampling.steps ? `${sampling.steps} steps, ${numFrames} of which reveal tokens` : `${sampling.steps} steps`, sampling.seed === null ? "" : `seed ${sampling.seed}`, `${trace.length} tokens`].filter(Boolean).join(" · ");
$("legend").append(...legend([trace]));
explain();
timeline.setViews([view]);
listenToKeys(timeline, card);

// page.html#frame=40 opens paused at that frame; without it, playback starts automatically.
const requested = /^#frame=(\d+)$/.exec(location.hash);
const first = requested ? trace.steps.findIndex((step) => step.frame >= Number(requested[1])) : 0;
timeline.goTo(first < 0 ? trace.last : first);
if (!requested && !matchMedia("(prefers-reduced-motion: reduce)").matches) setTimeout(() => timeline.timer || timeline.current || timeline.play(true), 700);
