"""What an evaluation gave, as lines for people."""

from __future__ import annotations

from collections.abc import Sequence

from trainer.evaluation import Row


def table(rows: Sequence[Row], title: str, before: Sequence[Row] | None = ()) -> list[str]:
    """The rows for people, aligned. With `before`, the same rows measured earlier, τ reads "1.00 → 2.61".

    `before` is None if what was measured earlier cannot be compared; then τ reads "– → 2.61".
    """
    earlier = {row.name: _tau(row) for row in before or ()}
    timed = any(row.tokens_per_second is not None for row in rows)
    budget = max((row.tree_budget for row in rows), default=0)
    head = [title, "τ", "prompt lookup's τ", "distinct 3-grams", "text = target's own"]
    head[2:2] = [f"τ of trees of {budget}"] if budget else []
    head += ["tok/s", "target alone", "faster by"] if timed else []
    cells = [head]
    for row in rows:
        then = "–" if before is None else earlier.get(row.name)
        line = [
            row.name,
            _tau(row) if then is None else f"{then} → {_tau(row)}",
            f"{row.lookup_tau:.2f}" if row.drafted else "–",
            f"{row.distinct3:.2f}",
            f"{row.identical}/{row.prompts}",
        ]
        line[2:2] = [f"{row.tree_tau or 0:.2f}" if row.drafted else "–"] if budget else []
        if timed:
            fast, slow = row.tokens_per_second or 0.0, row.plain_tokens_per_second or 0.0
            line += [f"{fast:.1f}", f"{slow:.1f}", f"{fast / slow:.2f}×" if row.drafted and slow else "–"]
        cells.append(line)
    widths = [max(len(line[column]) for line in cells) for column in range(len(cells[0]))]
    lines = []
    for name, *numbers in cells:
        aligned = [number.rjust(width) for number, width in zip(numbers, widths[1:], strict=True)]
        lines.append("  ".join([name.ljust(widths[0]), *aligned]))
    for row in rows:
        if not row.drafted:
            lines.append(f"{row.name}: every text ended with its first token, so nothing could be drafted")
        if row.lead_at_difference is not None:
            differ = row.prompts - row.identical
            if row.tree_identical is not None:
                differ += row.prompts - row.tree_identical
            lines.append(
                f"{row.name}: {differ} texts differ; where they part, the target had "
                f"preferred its own token by {row.lead_at_difference:.2g} logits at most"
                f"{_verdict(row)}"
            )
    return lines


def _verdict(row: Row) -> str:
    if row.beyond_rounding:
        return f": in {row.beyond_rounding} that is more than rounding, so the decoding is wrong"
    return ", which is rounding"


def histogram(row: Row) -> str:
    """How many tokens the cycles of a row added, for people."""
    cycles = sum(row.histogram)
    shares = [f"{count}: {n / cycles:.0%}" for count, n in enumerate(row.histogram, 1) if n]
    return f"{row.name}: {cycles} cycles, by the tokens they added · {' · '.join(shares) or '–'}"


def _tau(row: Row) -> str:
    return f"{row.tau:.2f}" if row.drafted else "–"
