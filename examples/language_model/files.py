"""Files that are whole whenever the process dies."""

from pathlib import Path


def write_whole(path: Path, text: str) -> None:
    """Writes a file under another name, and then renames it."""
    draft = path.with_name(path.name + ".partial")
    draft.write_text(text)
    draft.replace(path)
