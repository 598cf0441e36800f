"""docs/families.md describes each family as the code does."""

from pathlib import Path

from vlm_worker.core.families import FAMILIES

PAGE = Path(__file__).parents[2] / "docs" / "families.md"


def rows() -> dict[str, list[str]]:
    """Cells of the first table, by `model_type`."""
    lines = PAGE.read_text().split("| `model_type` |")[1].splitlines()[2:]
    table = [line for line in lines if line.startswith("| `")]
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in table]
    return {row[0].strip("`"): row[1:] for row in cells}


def test_the_table_has_every_family():
    assert rows().keys() == FAMILIES.keys()


def test_each_row_equals_the_code():
    for model_type, (_, processors, positions, attention) in rows().items():
        spec = FAMILIES[model_type]
        named = [name.strip("`") for name in processors.split(", ")]
        assert [f"{name}{end}" for name in named for end in ("", "Fast", "Pil")] == list(
            spec.image_processors
        )
        assert positions == spec.positions
        assert attention == ("both directions" if spec.attends.keeps_images_whole else "causal")
