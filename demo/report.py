"""The table at the end."""

from __future__ import annotations

from dataclasses import dataclass, field

from rich import box
from rich.console import Console
from rich.table import Table


@dataclass
class Report:
    """What was measured, in order."""

    url: str
    rows: list[tuple[str, str]] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)

    def add(self, what: str, value: str) -> None:
        """One more line."""
        self.rows.append((what, value))

    def fault(self, what: str) -> None:
        """Something that kvquilt promises did not hold."""
        self.faults.append(what)

    def print(self, console: Console) -> None:
        """The table and the address of the page."""
        console.rule("measured in this run")
        table = Table(box=box.SIMPLE, show_header=False, pad_edge=False)
        table.add_column()
        table.add_column(justify="right")
        for what, value in self.rows:
            table.add_row(what, value)
        console.print(table)
        console.print(f"page: {self.url}/", style="bold", soft_wrap=True)
