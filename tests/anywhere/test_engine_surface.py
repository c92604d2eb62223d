"""vLLM's surface, as this package uses it, in each supported version; and the checker itself.

The committed facts come from wheels (`python -m ci.surface 0.26.0 ...`); those of the installed
version are read afresh. Nothing here imports vLLM.
"""

import ast
import json
import zipfile
from pathlib import Path
from textwrap import dedent
from typing import Any

import pytest

from ci.surface.compare import binds, called_signature, problems, unused_bridges
from ci.surface.facts import FACTS, PACKAGE, VERSIONS, dump, extract, installed
from ci.surface.offered import Source
from ci.surface.used import Usage, package_usage

USAGE = package_usage(PACKAGE)
COMMITTED: dict[str, dict[str, Any]] = json.loads(FACTS.read_text())
RECORD = "run `python -m ci.surface 0.26.0 0.28.0 0.30.0 0.33.0`, then `python -m ci.surface`"

# Interfaces whose loss or change a reader of this package must hear about, whatever the code that
# is found by itself says: what vLLM calls on us (by these arguments) and what we hand to it.
CALLED_ON_US = {
    "vllm.model_executor.layers.attention_layer_base:AttentionLayerBase": {
        "get_attn_backend": "()",
        "get_kv_cache_spec": "(vllm_config)",
    },
    "vllm.v1.attention.backend:AttentionMetadataBuilder": {
        "__init__": "(kv_cache_spec, layer_names, vllm_config, device)",
        "build": "(common_prefix_len, common_attn_metadata, fast_build=)",
    },
}
HANDED_OVER = {
    "vllm.model_executor.models.registry:_ModelRegistry.register_model": (2, ()),
    "vllm.v1.kv_cache_interface:SlidingWindowSpec": (
        0,
        ("block_size", "num_kv_heads", "head_size", "head_size_v", "dtype", "sliding_window"),
    ),
    "vllm.v1.kv_cache_interface:FullAttentionSpec": (
        0,
        ("block_size", "num_kv_heads", "head_size", "head_size_v", "dtype"),
    ),
}


def test_facts_cover_every_supported_version() -> None:
    assert tuple(sorted(COMMITTED)) == VERSIONS
    assert FACTS.read_text() == dump(COMMITTED)


def test_installed_vllm_equals_its_committed_facts() -> None:
    source = Source(installed())
    fresh = extract(source, USAGE)
    committed = COMMITTED[source.version]
    changed = sorted(k for k in fresh.keys() | committed if fresh.get(k) != committed.get(k))
    assert not changed, f"facts of {source.version} are stale for {changed}; {RECORD}"


@pytest.mark.parametrize("version", VERSIONS)
def test_package_fits_vllm(version: str) -> None:
    assert problems(COMMITTED[version], USAGE) == [], f"vLLM {version} does not fit; {RECORD}"


def test_every_bridge_leads_somewhere() -> None:
    assert unused_bridges(COMMITTED, USAGE) == []


@pytest.mark.parametrize("version", VERSIONS)
def test_interfaces_that_carry_the_plugin(version: str) -> None:
    facts = COMMITTED[version]
    for key, methods in CALLED_ON_US.items():
        for method, signature in methods.items():
            assert facts[key]["members"][method] == signature
    for key, (positional, keywords) in HANDED_OVER.items():
        signature_found = called_signature(facts, USAGE, key)
        assert signature_found is not None, f"{key} has no signature in {version}"
        assert binds(signature_found, positional, dict.fromkeys(keywords)) is None


def test_the_reader_sees_what_the_package_does() -> None:
    """Counts from a second, naive reading: a reader that overlooks things must not pass."""
    imported = set()
    for file in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "vllm":
                imported |= {f"{node.module}:{alias.name}" for alias in node.names}
    assert imported and imported <= USAGE.names()
    signatures = [called_signature(COMMITTED["0.32.0"], USAGE, call[0]) for call in USAGE.calls]
    assert sum(s is not None for s in signatures) >= 20
    assert len(USAGE.overrides()) >= 4


# The checker against planted faults --------------------------------------------------------------


class Recording(Source):
    """Remembers every file that was read, to build a small wheel from them."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.read: dict[str, str] = {}

    def text(self, name: str) -> str | None:
        text = super().text(name)
        if text is not None:
            self.read[name] = text
        return text


@pytest.fixture(scope="module")
def read_files() -> dict[str, str]:
    source = Recording(installed())
    extract(source, USAGE)
    return source.read


def wheel(path: Path, files: dict[str, str], version: str = "0.99.0") -> Source:
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(f"vllm-{version}.dist-info/METADATA", f"Name: vllm\nVersion: {version}\n")
        for name, text in files.items():
            archive.writestr(name, text)
    return Source(path)


def test_a_wheel_of_the_same_files_gives_the_same_facts(
    tmp_path: Path, read_files: dict[str, str]
) -> None:
    source = wheel(tmp_path / "vllm.whl", read_files, "1.2.3")
    assert source.version == "1.2.3"
    assert extract(source, USAGE) == COMMITTED[Source(installed()).version]


PLANTED = [
    (
        "vllm/v1/attention/backend.py",
        "common_attn_metadata: CommonAttentionMetadata",
        "attention: CommonAttentionMetadata",
        ["build", "overrides", "attention"],
    ),
    (
        "vllm/model_executor/layers/linear.py",
        "reduce_results: bool",
        "reduce: bool",
        ["RowParallelLinear", "reduce_results"],
    ),
    (
        "vllm/v1/attention/backend.py",
        "block_table_tensor: torch.Tensor",
        "block_table: torch.Tensor",
        ["CommonAttentionMetadata.block_table_tensor is used", "lacks it"],
    ),
    (
        "vllm/model_executor/layers/attention_layer_base.py",
        "def get_attn_backend(",
        "def get_backend(",
        ["lacks get_backend", "declares abstract"],
    ),
    (
        "vllm/model_executor/models/utils.py",
        "def maybe_prefix(",
        "def join_prefix(",
        ["maybe_prefix is imported unconditionally", "lacks it"],
    ),
    (
        "vllm/model_executor/models/registry.py",
        "def register_model(",
        "def register_class(",
        ["_ModelRegistry.register_model is used", "lacks it"],
    ),
]


@pytest.mark.parametrize(("file", "old", "new", "says"), PLANTED)
def test_planted_changes_are_reported(
    tmp_path: Path, read_files: dict[str, str], file: str, old: str, new: str, says: list[str]
) -> None:
    assert old in read_files[file]
    changed = read_files | {file: read_files[file].replace(old, new)}
    found = problems(extract(wheel(tmp_path / "vllm.whl", changed), USAGE), USAGE)
    assert any(all(word in line for word in says) for line in found), found


VLLM = {
    "vllm/__init__.py": """
        TABLE = {"Late": ".deep.inner:Real"}
        def __getattr__(name): ...
    """,
    "vllm/deep/__init__.py": "from .inner import Real as Renamed\nfrom vllm.deep.star import *",
    "vllm/deep/star.py": "if True:\n    def starred(x, /, y=1, *args, z, **more): ...",
    "vllm/deep/inner.py": """
        from abc import abstractmethod
        from dataclasses import dataclass, field
        from typing import ClassVar
        class Root:
            def __init__(self, a, b=2): self.made = a
            @abstractmethod
            def must(self, x, *, y): ...
            @property
            def seen(self): ...
            @staticmethod
            def plain(one): ...
            def _named(self, p, q): ...
            def _mixed(self, p, q): self._named(p=1, q=2); self._mixed(1, q=2)
        class Real(Root):
            flag = 1
        @dataclass
        class Base:
            size: int
            shared: ClassVar[int] = 0
        @dataclass
        class Fields(Base):
            name: str = ""
            hidden: int = field(init=False)
    """,
}
OURS = """
    from vllm import Late
    from vllm.deep import Renamed, starred
    from vllm.deep.inner import Fields
    try:
        from vllm.deep import missing
    except ImportError:
        from vllm.deep.inner import Root as missing
    class Mine(Renamed):
        def __init__(self): super().__init__(1, b=3)
        def must(self, x, *, y): return Fields(3, name="n")
        def _named(self, **both): ...
        def _mixed(self, p, q): ...
    def use(it: Late):
        starred(1, 2, z=3)
        return it.made, it.seen, it.flag, it.plain(4)
"""


def miniature(tmp_path: Path, ours: str) -> tuple[dict[str, Any], Usage]:
    package = tmp_path / "inkling_portable"
    (package / "model").mkdir(parents=True)
    (package / "model" / "engine.py").write_text(dedent(ours))
    usage = package_usage(package)
    files = {name: dedent(text) for name, text in VLLM.items()}
    return extract(wheel(tmp_path / "vllm.whl", files), usage), usage


def test_definitions_are_followed_and_signatures_read(tmp_path: Path) -> None:
    facts, usage = miniature(tmp_path, OURS)
    real = {"at": "vllm.deep.inner:Real", "kind": "class", "params": "(a, b=)"}
    members = {"flag": "field", "made": "attribute", "plain": "(one)", "seen": "property"}
    assert facts["vllm:Late"] == real | {"members": members}
    assert facts["vllm.deep:Renamed"] == real | {
        "abstract": ["must"],
        "members": {
            "__init__": "(a, b=)",
            "_mixed": "(p, q)",
            "_named": "(p, q) by name",
            "must": "(x, *, y)",
        },
    }
    assert facts["vllm.deep:starred"] == {
        "at": "vllm.deep.star:starred",
        "kind": "function",
        "params": "(x, /, y=, *args, z, **more)",
    }
    assert facts["vllm.deep.inner:Fields"] == {"kind": "class", "params": "(size, name=)"}
    assert facts["vllm.deep:missing"] is None
    assert usage.groups == [("vllm.deep:missing", "vllm.deep.inner:Root")]
    assert problems(facts, usage) == []


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        ("super().__init__(1, b=3)", "super().__init__(b=3)", "missing a required argument: 'a'"),
        ("starred(1, 2, z=3)", "starred(1, 2)", "missing a required"),
        ('Fields(3, name="n")', "Fields(3, hidden=1)", "unexpected keyword argument 'hidden'"),
        ("def must(self, x, *, y)", "def must(self, x, z, *, y)", "overrides"),
        ("def must(self, x, *, y)", "def must(self, x)", "overrides"),
        ("def must(self, x, *, y)", "def must(self, other, *, y)", "overrides"),
        ("def must(self, x, *, y)", "def may(self, x, *, y)", "declares abstract"),
        ("def _named(self, **both)", "def _named(self, p)", "overrides"),
        ("def _mixed(self, p, q)", "def _mixed(self, **both)", "overrides"),
        ("it.seen", "it.unseen", "unseen is used"),
        ("it.plain(4)", "it.plain(4, 5)", "too many positional arguments"),
        ("from vllm import Late", "from vllm import Lost as Late", "imported unconditionally"),
        ("import Root as missing", "import Rot as missing", "this vLLM has none"),
    ],
)
def test_faults_of_ours_are_reported(tmp_path: Path, old: str, new: str, says: str) -> None:
    assert old in OURS
    facts, usage = miniature(tmp_path, OURS.replace(old, new))
    found = problems(facts, usage)
    assert any(says in line for line in found), found


def test_a_bridge_to_nowhere_is_reported(tmp_path: Path) -> None:
    facts, usage = miniature(tmp_path, OURS)
    assert unused_bridges({"0.99.0": facts}, usage) == [
        "vllm.deep:missing is in no version; remove the bridge"
    ]
