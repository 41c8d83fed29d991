"""What a person sees: a live line on a terminal, plain lines in a file. Rank 0 speaks for all."""

from pathlib import Path
from types import TracebackType

from rich.console import Console as RichConsole
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from recipes.files.atomic import Lines

# A young model emits any byte; an escape among them would be an order to the terminal.
CONTROLS = {code: "\N{REPLACEMENT CHARACTER}" for code in (*range(32), 127) if chr(code) not in "\n\t"}


class Console:
    """Prints to standard output and, as plain text, to a log file. A silent one (other ranks) does nothing."""

    def __init__(self, *, silent: bool) -> None:
        self._silent = silent
        self._screen = self._new_screen()
        self._log: Lines | None = None
        self._early: list[str] = []  # what was said before there was a log
        self._progress: Progress | None = None

    def open_log(self, path: Path) -> None:
        """Lines go to this file too, after what it holds already; those said before follow now."""
        if not self._silent:
            self._log = Lines(path, tell=self._show)
            self._log.append(*self._early)

    def say(self, text: str = "", *, style: str | None = None) -> None:
        text = text.translate(CONTROLS)
        self._show(text, style=style)
        if self._log is not None:
            self._log.append(text)
        elif not self._silent:
            self._early.append(text)

    def _show(self, text: str, *, style: str | None = None) -> None:
        try:
            self._screen.print(text, style=style)
        except OSError:  # the screen may be a file on the disk that is full: training goes on
            self._screen = self._new_screen()  # the old one would print this again, with all that follows

    def _new_screen(self) -> RichConsole:
        # Numbers are read more easily without colours on half of them, and text may hold [brackets] and :colons:.
        return RichConsole(highlight=False, markup=False, emoji=False, soft_wrap=True, quiet=self._silent)

    def progress(self, step: int, steps: int, text: str) -> None:
        """Move the live line, which only a terminal has."""
        if self._silent or not self._screen.is_terminal:
            return
        if self._progress is None:
            self._progress = Progress(
                TextColumn("{task.description}"),
                BarColumn(),
                MofNCompleteColumn(),
                TimeRemainingColumn(),
                console=self._screen,
                transient=True,
            )
            self._progress.add_task("", total=steps)
            self._progress.start()
        self._progress.update(self._progress.task_ids[0], completed=step, description=text)

    def end_progress(self) -> None:
        if self._progress is not None:
            self._progress.stop()
            self._progress = None

    def __enter__(self) -> "Console":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.end_progress()
