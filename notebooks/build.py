"""Sources under notebooks/src/ → notebooks/**/*.ipynb, and generated tables: `python -m notebooks.build`.

The repository's address is that of pyproject.toml; `{badge}` and `{repository}` in a source become it, and
`--repository` sets another one, as a fork needs. A line
`# {install}` becomes the cells of notebooks/src/_install.py. Two builds of one source give the same bytes: no outputs,
no widget metadata, and a cell's id is a hash of its text.
"""

import argparse
import dataclasses
import hashlib
import re
import sys
import tomllib
from pathlib import Path

import nbformat
from nbformat import NotebookNode

from nbtools.train import LR_FACTORS, Plan

ROOT = Path(__file__).resolve().parent.parent
SOURCES = ROOT / "notebooks" / "src"
README, OPTIONS = "README.md", "docs/options.md"
LARGER = ((2, "1.5–2", "3–5"), (4, "2–3", "5–10"), (8, "2–4", "10–20"), (16, "3–5", "20–30"))  # a guide's, see `larger`
MADE = r"(<!-- {0} -->\n).*?(<!-- /{0} -->)"  # their generated lines lie between these

METADATA = {
    "colab": {"provenance": []},
    "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
    "language_info": {"name": "python"},
}
GPU = {"accelerator": "GPU", "colab": {"gpuType": "T4", "provenance": []}}  # Colab opens the notebook with one


def repository() -> str:
    """The address of the repository, without a slash at its end."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    return project["urls"]["Repository"].rstrip("/")


def move(address: str) -> None:
    """Write another address of the repository into pyproject.toml and README.md.

    Raises ValueError for one that is not on GitHub: from there Colab opens a notebook.
    """
    address = address.rstrip("/").removesuffix(".git")
    if not re.fullmatch(r"https://github\.com/[\w.-]+/[\w.-]+", address):
        raise ValueError(f"REPOSITORY must be https://github.com/OWNER/NAME, got {address}")
    former = repository()
    for path in (ROOT / "pyproject.toml", ROOT / "README.md"):
        path.write_text(path.read_text().replace(former, address))


def names() -> list[str]:
    """Every notebook by its path under notebooks/, without ending: `captcha/1_data`, in reading order."""
    found = [path.relative_to(SOURCES).with_suffix("").as_posix() for path in SOURCES.rglob("[!_]*.py")]
    return sorted(found, key=lambda name: (name.startswith("9"), "/" in name, name))


def on_colab(address: str) -> str:
    """Where Colab opens the notebooks; their names follow."""
    path = address.removeprefix("https://github.com/")
    return f"https://colab.research.google.com/github/{path}/blob/main/notebooks/"


def badge(name: str, address: str) -> str:
    """Markdown of the button that opens a notebook in Colab."""
    link = f"{on_colab(address)}{name}.ipynb"
    return f"[![Open in Colab](https://colab.research.google.com/assets/colab-badge.svg)]({link})"


def notebook(name: str, address: str) -> NotebookNode:
    """The notebook of a source as nbformat's value."""
    import jupytext  # which imports a Jupyter server

    text = (SOURCES / f"{name}.py").read_text()
    if "# {install}\n" in text:
        text = text.replace("# {install}\n", (SOURCES / "_install.py").read_text())
    text = text.replace("{badge}", badge(name, address)).replace("{repository}", address)
    text = text.replace("{open}", on_colab(address))
    cells = []
    for cell in jupytext.reads(text, fmt="py:percent").cells:
        make = nbformat.v4.new_code_cell if cell.cell_type == "code" else nbformat.v4.new_markdown_cell
        made = make(cell.source, id=identity(cell.source, {c.id for c in cells}))
        kept = ("tags", "cellView", "jupyter")  # the last two fold a cell, in Colab and in JupyterLab
        made.metadata.update({name: cell.metadata[name] for name in kept if name in cell.metadata})
        cells.append(made)
    opened = METADATA if "**GPU:** none needed" in text else METADATA | GPU
    return nbformat.v4.new_notebook(cells=cells, metadata=opened)


def with_parameters(made: NotebookNode, **values: object) -> NotebookNode:
    """The notebook with other settings, in a cell below the one tagged `parameters`: as papermill does."""
    place = next(i for i, cell in enumerate(made.cells) if "parameters" in cell.metadata.get("tags", ()))
    lines = "\n".join(f"{name} = {value!r}" for name, value in values.items())
    made.cells.insert(place + 1, nbformat.v4.new_code_cell(lines, id="parameters"))
    return made


def identity(source: str, taken: set[str]) -> str:
    """An id that moves with its cell: a hash of the text, and of a number where two cells are alike."""
    for number in range(len(taken) + 1):
        found = hashlib.blake2b(f"{number}{source}".encode(), digest_size=4).hexdigest()
        if found not in taken:
            return found
    raise AssertionError("as many ids as cells and one more are never all taken")


def table(address: str) -> str:
    """The README's table: a row a notebook, with the title and the first sentence of its first cell, up to a colon."""
    rows = ["| notebook | what it does | |", "| --- | --- | --- |"]
    for name in names():
        title, _, promise, *_ = notebook(name, address).cells[0].source.split("\n\n")
        sentence = re.split(r"[:.!?]\s", promise.replace("\n", " ") + " ")[0] + "."
        rows.append(f"| [{title.removeprefix('# ')}](notebooks/{name}.ipynb) | {sentence} | {badge(name, address)} |")
    return "\n".join(rows) + "\n"


def options() -> str:
    """The table of a plan's fields, as options of the terminal."""
    rows = ["| option | default | what it does |", "| --- | --- | --- |"]
    for field in dataclasses.fields(Plan):
        choices = field.metadata["choices"]
        means = field.metadata["help"] + (f" ({', '.join(map(str, choices))})" if choices else "")
        default = ",".join(map(str, field.default)) if isinstance(field.default, tuple) else field.default
        rows.append(f"| `--{field.name.replace('_', '-')}` | {str(default).lower()} | {means} |")
    return "\n".join(rows) + "\n"


def larger() -> str:
    """The guide's table of larger batches, next to the factors of `Plan.lr_rule`."""
    rows = [
        "| batch | lr in the guide | `--lr-rule sqrt` | `--lr-rule linear` | epochs of warmup in the guide |",
        "| --- | --- | --- | --- | --- |",
    ]
    for k, times, epochs in LARGER:
        sqrt, linear = (f"× {LR_FACTORS[rule](k):.3g}" for rule in ("sqrt", "linear"))
        rows.append(f"| × {k} | × {times} | {sqrt} | {linear} | {epochs} |")
    return "\n".join(rows) + "\n"


def outputs() -> dict[Path, str]:
    """What every generated file must contain."""
    address = repository()
    files = {ROOT / "notebooks" / f"{name}.ipynb": nbformat.writes(notebook(name, address)) + "\n" for name in names()}
    made = ((README, "notebooks", table(address)), (OPTIONS, "options", options()), (OPTIONS, "larger", larger()))
    for path, name, lines in made:
        if (ROOT / path).exists():
            text = files.get(ROOT / path) or (ROOT / path).read_text()
            files[ROOT / path] = re.sub(
                MADE.format(name), lambda at, lines=lines: at[1] + lines + at[2], text, flags=re.S
            )
    return files


def stale() -> list[Path]:
    """Generated files that differ from what their source gives, and notebooks that have none."""
    files = outputs()
    orphans = [path for path in (ROOT / "notebooks").rglob("*.ipynb") if path not in files]
    orphans = [path for path in orphans if ".ipynb_checkpoints" not in path.parts]
    return [path for path, text in files.items() if not path.exists() or path.read_text() != text] + orphans


def main() -> int:
    parser = argparse.ArgumentParser(description="Generate the notebooks and the README's tables.")
    parser.add_argument("--check", action="store_true", help="write nothing; fail when a file differs from its source")
    parser.add_argument("--repository", help="first change the address of the repository, as a fork needs")
    options = parser.parse_args()
    if options.repository:
        try:
            move(options.repository)
        except ValueError as error:
            parser.error(str(error))
    if options.check:
        different = [path.relative_to(ROOT).as_posix() for path in stale()]
        if different:
            print(f"not what notebooks/src/ says: {', '.join(different)}; run: make notebooks", file=sys.stderr)
        return bool(different)
    for path, text in outputs().items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
