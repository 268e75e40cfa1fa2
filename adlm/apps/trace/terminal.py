"""Shows a sampling run live in the terminal: frames pass through unchanged, a few per second are drawn.

Does not depend on samplers; the caller may also record the frames, or use only the last one.
"""

import time
from collections.abc import Iterable, Iterator

from rich.console import Console, ConsoleOptions, RenderResult
from rich.live import Live
from rich.text import Text

from adlm.apps.trace.recording import anchors_of
from adlm.errors import TEXT, printable
from adlm.language_model import LanguageModel
from adlm.methods.inputs import vocabulary_of
from adlm.sampling.frame import Frame
from adlm.tokens import decode_side_by_side, text_of, tokens_bytes

FRAMES_PER_SECOND = 12

STYLES = {
    "given": "",
    "masked": "bright_black",
    "drawn": "cyan",
    "anchor": "bold yellow",
    "new": "reverse",
    "remasked": "magenta",
}


def show_in_terminal(
    lm: LanguageModel,
    frames: Iterable[Frame],
    console: Console,
    row: int = 0,
    start: int = 0,
    special_tokens: bool = False,
) -> Iterator[Frame]:
    """Pass the frames through and draw one row of them on the console; the last frame stays there.

    Positions before `start` are context and are not shown (`Canvas.starts`). If the console is not a terminal,
    only the final text is printed. A token is marked as an anchor if it was the anchor network's top prediction when it
    was drawn, which costs one anchor network call per frame. bos, eos and pad are shown only with `special_tokens`.
    """
    view = TerminalView(lm, row, start, special_tokens)
    if not console.is_terminal:
        last = None
        for last in frames:
            yield last
        if last is not None:
            console.file.write(printable(view.plain_text(last), keep=TEXT) + "\n")
        return
    with Live(view, console=console, auto_refresh=False, transient=True) as live:
        drawn_at = 0.0
        for frame in frames:
            view.update(frame)
            if time.monotonic() - drawn_at >= 1 / FRAMES_PER_SECOND:
                live.refresh()
                drawn_at = time.monotonic()
            yield frame
    console.print(view.text(final=True))
    console.print(view.status_line(final=True), no_wrap=True, overflow="ellipsis")


class TerminalView:
    """The current text of one row, coloured, with a status line below."""

    def __init__(self, lm: LanguageModel, row: int, start: int = 0, special_tokens: bool = False):
        self._lm, self._row, self._start, self._special_tokens = lm, row, start, special_tokens
        self._frame: Frame | None = None
        self._frame_number = -1
        self._given: set[int] = set()
        self._anchors: set[int] = set()
        self._mask = " ░░░" if lm.tokenizer is None or lm.tokenizer.vocabulary.size > 300 else "░"

    def update(self, frame: Frame) -> None:
        ids, row = frame.ids[self._row], self._row
        if self._frame is None:
            self._given = set((ids != self._lm.mask_id).nonzero().flatten().tolist())
        elif frame.revealed[row].any():
            best = anchors_of(self._lm, frame, row)
            for position in frame.revealed[row].nonzero().flatten().tolist():
                (self._anchors.add if best.get(position) == int(ids[position]) else self._anchors.discard)(position)
        self._frame = frame
        self._frame_number += 1

    def text(self, final: bool = False) -> Text:
        """The tokens, coloured by kind; the final text does not mark the tokens of the last frame as new."""
        text = Text(overflow="fold")
        if self._frame is None:
            return text
        ids, revealed, remasked = (
            part[self._row].tolist() for part in (self._frame.ids, self._frame.revealed, self._frame.remasked)
        )
        pieces = tokens_bytes(self._lm.tokenizer, ids[self._start :], self._special_tokens)
        left_out = self._left_out(self._frame)
        unmasked = [
            None if index == self._lm.mask_id else b"" if position in left_out else data
            for position, (index, data) in enumerate(zip(ids[self._start :], pieces, strict=True), self._start)
        ]
        for position, token_text in enumerate(decode_side_by_side(unmasked), self._start):
            is_new, is_remasked = revealed[position] and not final, remasked[position] and not final
            if ids[position] == self._lm.mask_id:
                text.append(self._mask, STYLES["remasked" if is_remasked else "masked"])
            else:
                kind = "given" if position in self._given else "anchor" if position in self._anchors else "drawn"
                text.append(printable(token_text), f"{STYLES[kind]} {STYLES['new'] if is_new else ''}")
        return text

    def plain_text(self, frame: Frame) -> str:
        """The text of the row at a frame, without colours."""
        ids, left_out = frame.ids[self._row].tolist(), self._left_out(frame)
        kept = [ids[position] for position in range(self._start, len(ids)) if position not in left_out]
        return text_of(self._lm.tokenizer, kept, self._special_tokens)

    def _left_out(self, frame: Frame) -> set[int]:
        """The positions that are no part of the text: in holes of unknown length, their end and what is left."""
        if frame.open is None:
            return set()
        is_end = frame.ids[self._row] == vocabulary_of(self._lm.config).eos_id
        return set((frame.open[self._row] & is_end).nonzero().flatten().tolist())

    def status_line(self, final: bool = False) -> Text:
        """t, frame and share of masks, followed by a legend of the colours."""
        line = Text(no_wrap=True, overflow="ellipsis")
        if self._frame is not None:
            share = float((self._frame.ids[self._row] == self._lm.mask_id).double().mean())
            t = float(self._frame.t[self._row])
            line.append(f"t {t:.3f}  frame {self._frame_number}  {share:.0%} masked ", "dim")
        transient = ("masked", "new", "remasked") if final else ()
        absent = {name for name, positions in (("given", self._given), ("anchor", self._anchors)) if not positions}
        for name, style in STYLES.items():
            if name not in absent and name not in transient:
                line.append("  ").append(name, style)
        return line

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        lines = self.text().wrap(console, options.max_width, overflow="fold")
        room = max(1, console.height - 2)  # the status line, and one for the cursor
        hidden = len(lines) - room
        if hidden > 0:
            yield Text("\n").join(lines[: room - 1])
            yield Text(f"... and {hidden + 1} more lines", style="dim")
        else:
            yield Text("\n").join(lines)
        yield self.status_line()
