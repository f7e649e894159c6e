"""Test the pages of `--html` in a real headless browser."""

from __future__ import annotations

import re
import shutil
import subprocess
from dataclasses import replace
from html import unescape
from pathlib import Path

import pytest

from mcore_ckpt_ext.cli.main import main
from mcore_ckpt_ext.cli.page import (
    comparison_page,
    escape_script,
    inspection_page,
    plan_page,
    rehearsal_page,
    write_page,
)
from mcore_ckpt_ext.errors import DestinationError
from mcore_ckpt_ext.formats.accounts import Account
from mcore_ckpt_ext.formats.unread_state import UnreadState
from mcore_ckpt_ext.operations.comparison_result import Comparison, KindComparison, TensorDifference
from mcore_ckpt_ext.operations.inspection import inspect
from mcore_ckpt_ext.operations.inspection_result import Inspection, StoredTensor
from mcore_ckpt_ext.operations.layout_plan import plan
from mcore_ckpt_ext.operations.metadata_comparison import MetadataComparison
from mcore_ckpt_ext.operations.options import ComparisonOptions
from mcore_ckpt_ext.rehearsal.result import SCHEMA, Rehearsal
from tests.harness.checkpoints import fixture_named

pytestmark = pytest.mark.thorough

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


def shown(browser: str, path: Path, script: str = "", width: int = 1200) -> str:
    """The page's elements after its scripts ran; `script` is a user's doing, `width` the window's."""
    if script:
        path.write_text(path.read_text().replace("</body>", f"<script>{script}</script></body>"))
    finished = subprocess.run(
        [browser, "--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={path.parent / 'profile'}",
         f"--window-size={width},900", "--dump-dom", path.as_uri()],
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
    bars = re.findall(r'title="(weight|fp32_param|exp_avg|exp_avg_sq|other): ', text)
    assert len(bars) == 5 + 8 * 5 - 4, "five kinds, then those of each of eight ranks; four wrote no objects"
    # The first buffer of the live job has 13 parameters, some drawn over several lines.
    parts = set(re.findall(r'data-part="(\d+)"', text))
    assert len(parts) == len(inspect(fixture_named("p01").run, buffers=True).buffers[0].parameters)


def test_searching_and_choosing_another_buffer(browser: str, tmp_path: Path, inspected: Inspection) -> None:
    path = tmp_path / "page.html"
    path.write_text(inspection_page(inspected))
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
    assert f"Order: {inspected.buffers[3].order_source}; sizes and chunk borders agree." in dom


def assert_it_stays_text(browser: str, path: Path, page: str, times: int) -> None:
    """The hostile name is shown at least so often, and nothing of it does anything."""
    path.write_text(page)
    dom = shown(browser, path)
    assert "<title>owned</title>" not in dom
    assert "<img" not in dom
    assert dom.count("&lt;img src=x") >= times, "the name is shown, as text"


def test_untrusted_names_stay_names(browser: str, tmp_path: Path, inspected: Inspection) -> None:
    tensor = StoredTensor("weight", HOSTILE, (1,), "float32")
    file = replace(inspected.files[0], file=HOSTILE, tensors=[HOSTILE])
    buffer = replace(inspected.buffers[0], group=HOSTILE, parameters=((HOSTILE, 0, 10),))
    hostile = replace(
        inspected, path=HOSTILE, tensors=(tensor,), files=(file,), buffers=(buffer,), model={HOSTILE: HOSTILE},
        bytes_by_kind={HOSTILE: 1}, why_silent=HOSTILE, silent_ranks=(1,),
    )  # fmt: skip
    assert_it_stays_text(browser, tmp_path / "page.html", inspection_page(hostile), times=6)


def test_nothing_is_loaded_from_other_sites(inspected: Inspection) -> None:
    text = inspection_page(inspected) + comparison_page(
        Comparison(2, "a", "b", ComparisonOptions(), True, True, None, (), (), ()), "equal"
    )
    outside = re.findall(r"""(?:src|href)\s*=|url\(|@import|fetch\(|XMLHttpRequest|https?://[^"' ]+""", text)
    assert [found for found in outside if "www.w3.org/2000/svg" not in found] == []
    assert "default-src 'none'" in text


def test_data_cannot_leave_its_element() -> None:
    assert not set("<>&") & set(escape_script(HOSTILE))


def test_a_rank_is_found_on_the_map_and_named_in_the_title(browser: str, tmp_path: Path, inspected: Inspection) -> None:
    path = tmp_path / "page.html"
    path.write_text(inspection_page(inspected))
    script = """
        const box = document.getElementById("rank");
        box.value = 5;
        box.dispatchEvent(new Event("input"));
    """
    dom = shown(browser, path, script)
    assert "<title>rank 5 (pipeline 2, data 1) - TP1 x PP4 x DP2, iteration 4 - " in dom
    assert "Rank 5 (pipeline 2, data 1): layers 2; it wrote __5_0.distcp, __5_1.distcp." in dom
    assert dom.count('class="lane lit"') == 1


def test_ten_thousand_files(browser: str, tmp_path: Path, inspected: Inspection) -> None:
    names = [f"decoder.layers.{layer}.mlp.linear_fc1.weight" for layer in range(200)]
    one = inspected.files[0]
    files = tuple(replace(one, file=f"__{n}_0.distcp", rank=n, tensors=names) for n in range(10_000))
    text = inspection_page(replace(inspected, files=files))
    assert len(text) < 15 << 20, "the names are there once"
    path = tmp_path / "page.html"
    path.write_text(text)
    script = """
        const box = document.getElementById("files");
        const all = document.querySelectorAll("#files-rows tr").length;
        const begun = performance.now();
        box.value = "rank 99 __99";
        box.dispatchEvent(new Event("input"));
        const summary = document.getElementById("files-found").textContent;
        document.title = `${all} rows, ${summary}, ${performance.now() - begun < 1000}`;
    """
    assert "<title>201 rows, 111 of 10,000 files, true</title>" in shown(browser, path, script)


def test_no_heading_breaks_on_a_phone(browser: str, tmp_path: Path, inspected: Inspection) -> None:
    path = tmp_path / "page.html"
    path.write_text(inspection_page(inspected))
    script = """
        const heads = [...document.querySelectorAll("th")].filter((head) => head.textContent);
        const broken = heads.filter((head) => head.offsetHeight > 32).length;
        const fits = document.documentElement.scrollWidth <= window.innerWidth;
        document.title = `${heads.length} heads, ${broken} broken, ${fits}`;
    """
    assert re.search(r"<title>\d\d heads, 0 broken, true</title>", shown(browser, path, script, width=400))


def test_the_page_of_a_comparison(browser: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, p01, p10 = tmp_path / "page.html", fixture_named("p01").run, fixture_named("p10").run
    assert main(["diff", str(p01), str(p10), "--kinds", "weight", "--html", str(path)]) == 1
    assert f"wrote {path}" in capsys.readouterr().err
    dom = shown(browser, path)
    assert dom.count('class="difference"') == 52
    assert "2,279 of 4,096 elements differ (55.6 %); by at most 0.00493" in dom
    assert "52 of 52 tensors" in dom
    assert re.search(r'class="cell".*?<title>\d+ elements differ here, by at most', dom)


def test_untrusted_names_stay_names_in_a_comparison(browser: str, tmp_path: Path) -> None:
    tensor = TensorDifference("weight", HOSTILE, ((1,), (1,)), ("float32", "float32"), 1, 1, problem=HOSTILE)
    kind = KindComparison("weight", 1, 1, (HOSTILE,), (HOSTILE,), (tensor,))
    unread = UnreadState(HOSTILE, HOSTILE, 1)
    found = Comparison(
        2,
        HOSTILE,
        HOSTILE,
        False,
        False,
        None,
        (kind,),
        (),
        (MetadataComparison(HOSTILE, HOSTILE, "b"),),
        Account(not_looked_at=(unread,)),
        Account(not_looked_at=(unread,)),
    )
    assert_it_stays_text(browser, tmp_path / "page.html", comparison_page(found, HOSTILE), times=8)


def text_of(dom: str) -> str:
    return unescape(re.sub(r"<[^>]*>", "", re.sub(r"<script.*?</script>", "", dom, flags=re.DOTALL)))


def test_the_page_of_a_plan(browser: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "page.html"
    assert main(["plan", str(fixture_named("p01").run), "--gpus", "6", "--read-rate", "1MiB", "--html", str(path)]) == 0
    assert f"wrote {path}" in capsys.readouterr().err
    dom = shown(browser, path)
    text = text_of(dom)
    expected_texts = (
        "not the same training: another --global-batch-size",
        "same training, but for rounding: TP2 x PP3 x DP1",
        "memory of the fullest GPU",
        "7 layouts of 6 GPUs",
        "Flags for TP2 x PP3 x DP1",
        "--decoder-last-pipeline-num-layers",
        "1 s",
        "7 of 7 layouts",
        "random states are reinitialized",
    )
    for expected in expected_texts:
        assert expected in text, expected
    assert len(re.findall(r'title="(?:weights|gradients|optimizer|activations): ', dom)) == 4 * 7


def test_the_page_of_a_plan_without_a_layout(browser: str, tmp_path: Path) -> None:
    path = tmp_path / "page.html"
    path.write_text(plan_page(plan(fixture_named("p01").run, 24, pins={"tp": 8})))
    text = text_of(shown(browser, path))
    assert "no layout of 24 GPUs is accepted" in text
    assert "4 attention heads cannot be divided by TP 8" in text


@pytest.mark.parametrize(("layout", "code"), [("tp=2 pp=2", 0), ("tp=4 pp=8", 1)])
def test_the_page_of_a_rehearsal(layout: str, code: int, browser: str, tmp_path: Path) -> None:
    path, run = tmp_path / "page.html", str(fixture_named("p10").run)
    assert main(["plan", run, "--gpus", "4", "--rehearse", layout, "--html", str(path)]) == code
    text = text_of(shown(browser, path))
    refused = ("this resume will be refused", "4 GPUs are not a multiple of TP x PP x CP = 32")
    succeeds = ("this resume will succeed", "each found once; placed by", "Taken for granted")
    for expected in refused if code else succeeds:
        assert expected in text, expected


def test_untrusted_names_stay_names_in_a_rehearsal(browser: str, tmp_path: Path) -> None:
    found = Rehearsal(SCHEMA, HOSTILE, 1, HOSTILE, HOSTILE, HOSTILE, HOSTILE, refusal=HOSTILE)
    assert_it_stays_text(browser, tmp_path / "page.html", rehearsal_page(found), times=4)


def test_a_page_takes_no_others_place(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = fixture_named("p01").copy_to(tmp_path / "source").run
    file = run / "iter_0000004" / "common.pt"
    before = file.read_bytes()
    for words in (["inspect", str(run)], ["diff", str(run), str(run)], ["plan", str(run), "--gpus", "4"]):
        assert main([*words, "--html", str(file)]) == 2
        assert "would overwrite a file that is not an HTML page" in capsys.readouterr().err
        assert main([*words, "--html", str(tmp_path / "nowhere" / "page.html")]) == 2
        assert "the folder of the page does not exist" in capsys.readouterr().err
    assert file.read_bytes() == before
    page = tmp_path / "page.html"
    assert [main(["inspect", str(run), "--html", str(page)]) for _ in range(2)] == [0, 0]


def test_a_page_that_cannot_be_written_leaves_the_earlier_one(tmp_path: Path) -> None:
    page = tmp_path / ("x" * 250)  # no name is left for the unfinished page
    page.write_text("<!doctype html>earlier")
    with pytest.raises(DestinationError, match="the page cannot be written; found: File name too long"):
        write_page(page, "<!doctype html>later")
    assert page.read_text() == "<!doctype html>earlier"
