"""Shared by the studies in docs/results.md: medians over seeds, tables, charts, and their places in the page."""

import html
import math
import statistics
import sys


def summary(runs):
    """The median, minimum and maximum of each figure over the runs. None (never) is the greatest value."""
    figures = [k for k, v in runs[0].items() if k != "seed" and not isinstance(v, list)]
    columns = {k: sorted(math.inf if run[k] is None else run[k] for run in runs) for k in figures}
    finite = {
        k: [None if math.isinf(v) else v for v in (statistics.median_low(c), c[0], c[-1])] for k, c in columns.items()
    }
    return {k: dict(zip(("median", "min", "max"), v, strict=True)) for k, v in finite.items()}


def show(spread, form):
    """Median (least to greatest)."""
    median, least, most = ("never" if v is None else form.format(v) for v in spread.values())
    return median if least == most else f"{median} ({least}-{most})"


def table(head, rows):
    """A table in Markdown. The first column is code and left-aligned."""
    lines = [head, ("---", *["---:"] * (len(head) - 1))]
    lines += [("`" + row[0].replace("|", "\\|") + "`", *row[1:]) for row in rows]
    return "".join("| " + " | ".join(line) + " |\n" for line in lines)


def bars(groups, highlight=None):
    """Horizontal bars as SVG. groups: (title, list of (label, value), format of values); None is never.

    highlight: what the labels of the bars in a colour of their own begin with.
    """
    lines, y = [], 0
    for title, rows, form in groups:
        longest = max([value or 0 for _, value in rows]) or 1
        lines.append(f'<text x="12" y="{y + 22}" font-weight="bold">{html.escape(title)}</text>')
        for i, (label, value) in enumerate(rows):
            top, width = y + 44 + 22 * i, round(400 * (value or 0) / longest, 1)
            colour = "#d9822b" if highlight and label.startswith(highlight) else "#3b6ea5"
            lines += [
                f'<text x="340" y="{top + 15}" text-anchor="end">{html.escape(label)}</text>',
                f'<rect x="352" y="{top + 3}" width="{width}" height="14" fill="{colour}"/>',
                f'<text x="{358 + width}" y="{top + 15}">{"never" if value is None else form.format(value)}</text>',
            ]
        y += 56 + 22 * len(rows)
    size = f'width="860" height="{y}" font-family="sans-serif" font-size="13"'
    white = '<rect width="100%" height="100%" fill="white"/>'
    return "\n".join([f'<svg xmlns="http://www.w3.org/2000/svg" {size}>', white, *lines, "</svg>\n"])


def marks(name):
    """The lines of a page between which a study writes."""
    return f"<!-- {name}:begin -->", f"<!-- {name}:end -->"


def write(page, name, text, title, chart):
    """Writes the text and its titled chart between the marks of the page. The chart is a file in results/ beside it."""
    begin, end = marks(name)
    head, mark, rest = page.read_text().partition(begin)
    _, found, tail = rest.partition(end)
    if not mark or not found:
        sys.exit(f"{page} has no lines {begin} and {end} to write between")
    picture = f"results/{name}.svg"
    (page.parent / picture).parent.mkdir(exist_ok=True)
    (page.parent / picture).write_text(chart)
    page.write_text(f"{head}{begin}\n{text}\n![{title}]({picture})\n{end}{tail}")
