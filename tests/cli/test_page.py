"""The page of `inspect --html`, in a real browser without a window."""

from __future__ import annotations

import re
import shutil
import subprocess
from dataclasses import replace
from html import unescape
from pathlib import Path

import pytest

from mcore_ckpt_ext.cli.main import main
from mcore_ckpt_ext.cli.page import embedded, page
from mcore_ckpt_ext.offline.inspection import Inspection, StoredTensor, inspect
from tests.harness.checkpoints import fixture_named

BROWSERS = ("chromium-headless-shell", "chromium", "chromium-browser", "google-chrome")
HOSTILE = "</script><script>document.title='owned'</script><img src=x onerror=\"document.title='owned'\"><!--<script>"


@pytest.fixture(scope="module")
def browser() -> str:
    found = next((path for name in BROWSERS if (path := shutil.which(name))), None)
    if found is None:
        pytest.skip(f"none of {', '.join(BROWSERS)} is installed: the page was not looked at in a browser")
    return found


@pytest.fixture(scope="module")
def inspected() -> Inspection:
    return inspect(fixture_named("p01").run, buffers=True)


def shown(browser: str, path: Path, script: str = "") -> str:
    """The page's elements after its scripts ran; `script` is a user's doing."""
    if script:
        path.write_text(path.read_text().replace("</body>", f"<script>{script}</script></body>"))
    finished = subprocess.run(
        [browser, "--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={path.parent / 'profile'}",
         "--dump-dom", path.as_uri()],
        capture_output=True, text=True, timeout=60, check=True,
    )  # fmt: skip
    return finished.stdout


def test_the_page_shows_everything(browser: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "page.html"
    assert main(["inspect", str(fixture_named("p01").run), "--html", str(path)]) == 0
    assert f"wrote {path}" in capsys.readouterr().err
    dom = shown(browser, path)
    text = unescape(re.sub(r"<script.*?</script>", "", dom, flags=re.DOTALL))
    for expected in ("TP1 x PP4 x DP2, iteration 4", "Bytes by kind", "Bytes by rank", "rank 7", "52 of 52 tensors",
                     "stock Megatron", "written by Megatron 0.16", "__0_0.distcp", "13,952 elements"):  # fmt: skip
        assert expected in text, expected
    bars = re.findall(r"<title>(weight|fp32_param|exp_avg|exp_avg_sq|other): ", text)
    assert len(bars) == 5 + 8 * 5 - 4, "five kinds, then those of each of eight ranks; four wrote no objects"
    # The first buffer of the live job has 13 parameters, some drawn over several lines.
    parts = set(re.findall(r'data-part="(\d+)"', text))
    assert len(parts) == len(inspect(fixture_named("p01").run, buffers=True).buffers[0].parameters)


def test_searching_and_choosing_another_buffer(browser: str, tmp_path: Path, inspected: Inspection) -> None:
    path = tmp_path / "page.html"
    path.write_text(page(inspected))
    script = """
        const box = document.getElementById("search");
        box.value = "LINEAR_fc1 layers.2";
        box.dispatchEvent(new Event("input"));
        const choose = document.getElementById("buffer");
        choose.value = "3";
        choose.dispatchEvent(new Event("change"));
    """
    dom = shown(browser, path, script)
    assert "4 of 52 tensors" in dom
    assert f"{inspected.buffers[3].numel:,} elements" in dom
    assert f"{inspected.buffers[0].numel:,} elements" not in dom


def test_names_of_strangers_stay_names(browser: str, tmp_path: Path, inspected: Inspection) -> None:
    tensor = StoredTensor("weight", HOSTILE, (1,), "float32")
    file = replace(inspected.files[0], file=HOSTILE, tensors=[HOSTILE])
    buffer = replace(inspected.buffers[0], group=HOSTILE, parameters=((HOSTILE, 0, 10),))
    hostile = replace(
        inspected, path=HOSTILE, tensors=(tensor,), files=(file,), buffers=(buffer,), model={HOSTILE: HOSTILE},
        bytes_by_kind={HOSTILE: 1}, why_silent=HOSTILE, silent_ranks=(1,),
    )  # fmt: skip
    path = tmp_path / "page.html"
    path.write_text(page(hostile))
    dom = shown(browser, path)
    assert "<title>owned</title>" not in dom
    assert "<img" not in dom
    assert dom.count("&lt;img src=x") >= 6, "the name is shown, as text"


def test_nothing_is_loaded_from_elsewhere(inspected: Inspection) -> None:
    text = page(inspected)
    outside = re.findall(r"""(?:src|href)\s*=|url\(|@import|fetch\(|XMLHttpRequest|https?://[^"' ]+""", text)
    assert [found for found in outside if "www.w3.org/2000/svg" not in found] == []
    assert "default-src 'none'" in text


def test_data_cannot_leave_its_element() -> None:
    assert not set("<>&") & set(embedded(HOSTILE))
