"""A walk on the terminal while it goes on: frames pass through, and a few of them a second are drawn.

Knows nothing of samplers; whoever calls may record the same frames, or take only the last.
"""

import time
from collections.abc import Iterable, Iterator

from rich.console import Console, ConsoleOptions, RenderResult
from rich.live import Live
from rich.text import Text

from adlm.errors import TEXT, printable
from adlm.language_model import LanguageModel
from adlm.sampling.frame import Frame
from adlm.trace.predictions import anchors_of
from adlm.trace.token_text import decode_side_by_side, text_of, tokens_bytes

FRAMES_A_SECOND = 12

STYLES = {
    "given": "",
    "masked": "bright_black",
    "drawn": "cyan",
    "anchor": "bold yellow",
    "new": "reverse",
    "again": "magenta",
}


def show_in_terminal(
    lm: LanguageModel,
    frames: Iterable[Frame],
    console: Console,
    row: int = 0,
    start: int = 0,
    special_tokens: bool = False,
) -> Iterator[Frame]:
    """The frames themselves, one row of them drawn on the console as they pass, the last one to stay there.

    The row's text begins at `start`; before it stands what is only read (`LanguageModel.opening`). Where the console is
    no terminal only the final text is printed. A token is an anchor if the anchor network's first guess was the same
    token, at what the network had read: that costs a call a frame, of the anchor network alone. bos, eos and pad are
    hidden unless `special_tokens` is set.
    """
    screen = TerminalView(lm, row, start, special_tokens)
    if not console.is_terminal:
        yield from _printed(screen, frames, console)
        return
    with Live(screen, console=console, auto_refresh=False, transient=True) as live:
        drawn = 0.0
        for frame in frames:
            screen.see(frame)
            if time.monotonic() - drawn >= 1 / FRAMES_A_SECOND:
                live.refresh()
                drawn = time.monotonic()
            yield frame
    console.print(screen.text(at_rest=True))
    console.print(screen.told(at_rest=True), no_wrap=True, overflow="ellipsis")


def _printed(screen: "TerminalView", frames: Iterable[Frame], console: Console) -> Iterator[Frame]:
    last = None
    for last in frames:
        yield last
    if last is not None:
        console.file.write(printable(screen.plain(last), keep=TEXT) + "\n")


class TerminalView:
    """One row as it stands, coloured, with a line below that says how far the walk is."""

    def __init__(self, lm: LanguageModel, row: int, start: int = 0, special_tokens: bool = False):
        self._lm, self._row, self._start, self._special_tokens = lm, row, start, special_tokens
        self._frame: Frame | None = None
        self._number = -1
        self._given: set[int] = set()
        self._anchors: set[int] = set()
        self._mask = " ░░░" if lm.tokenizer is None or lm.tokenizer.vocabulary.size > 300 else "░"

    def see(self, frame: Frame) -> None:
        ids, row = frame.ids[self._row], self._row
        if self._frame is None:
            self._given = set((ids != self._lm.mask_id).nonzero().flatten().tolist())
        elif frame.revealed[row].any():
            best = anchors_of(self._lm, frame, row)
            for place in frame.revealed[row].nonzero().flatten().tolist():
                (self._anchors.add if best.get(place) == int(ids[place]) else self._anchors.discard)(place)
        self._frame = frame
        self._number += 1

    def text(self, at_rest: bool = False) -> Text:
        """Every token in the colour of what it is; at rest, nothing has just happened."""
        text = Text(overflow="fold")
        if self._frame is None:
            return text
        ids, revealed, remasked = (
            part[self._row].tolist() for part in (self._frame.ids, self._frame.revealed, self._frame.remasked)
        )
        pieces = tokens_bytes(self._lm.tokenizer, ids[self._start :], self._special_tokens)
        unmasked = [
            None if index == self._lm.mask_id else data for index, data in zip(ids[self._start :], pieces, strict=True)
        ]
        for place, words in enumerate(decode_side_by_side(unmasked), self._start):
            fresh, again = revealed[place] and not at_rest, remasked[place] and not at_rest
            if ids[place] == self._lm.mask_id:
                text.append(self._mask, STYLES["again" if again else "masked"])
            else:
                kind = "given" if place in self._given else "anchor" if place in self._anchors else "drawn"
                text.append(printable(words), f"{STYLES[kind]} {STYLES['new'] if fresh else ''}")
        return text

    def plain(self, frame: Frame) -> str:
        """The row's text at a frame, without colours."""
        return text_of(self._lm.tokenizer, frame.ids[self._row, self._start :].tolist(), self._special_tokens)

    def told(self, at_rest: bool = False) -> Text:
        """How far the walk is, and what the colours mean."""
        line = Text(no_wrap=True, overflow="ellipsis")
        if self._frame is not None:
            share = float((self._frame.ids[self._row] == self._lm.mask_id).double().mean())
            t = float(self._frame.t[self._row])
            line.append(f"t {t:.3f}  frame {self._number}  {share:.0%} masked ", "dim")
        passing = ("masked", "new", "again") if at_rest else ()
        absent = {name for name, there in (("given", self._given), ("anchor", self._anchors)) if not there}
        for name, style in STYLES.items():
            if name not in absent and name not in passing:
                line.append("  ").append(name, style)
        return line

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        lines = self.text().wrap(console, options.max_width, overflow="fold")
        room = max(1, console.height - 2)  # the line below, and one for the cursor
        hidden = len(lines) - room
        if hidden > 0:
            yield Text("\n").join(lines[: room - 1])
            yield Text(f"... and {hidden + 1} more lines", style="dim")
        else:
            yield Text("\n").join(lines)
        yield self.told()
