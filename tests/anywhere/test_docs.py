"""Generated pages are in step with the code they describe."""

import importlib.util
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_numerics_page_is_current() -> None:
    spec = importlib.util.spec_from_file_location("numerics_page", ROOT / "ci/generate_numerics.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert (ROOT / "docs/numerics.md").read_text() == module.render()
