"""The picture of the README: the first screen of a measured run's report, in a real browser, light and dark.

    python tools/make_picture.py

The run is that of `docs/measured/report`, whose results file is whole, with the bench of its engine,
written as `qdqbench report` writes it.
Needs Chromium and playwright (the extra `dev`).
"""

import shutil
import tempfile
from pathlib import Path

from qdqbench.eval.runs.report.report import refresh_reports

ROOT = Path(__file__).resolve().parents[1]
MEASURED = ROOT / "docs" / "measured"
RUN, BENCH = MEASURED / "report" / "results.json", MEASURED / "benches" / "minilm-l6-sst2-openvino.json"
WIDTH, HEIGHT = 1180, 578


def write_page(folder: Path) -> Path:
    """The report of the measured run in a folder of its own; returns its page."""
    for source, name in ((RUN, "results.json"), (BENCH, "bench.json")):
        shutil.copy(source, folder / name)
    written, problem = refresh_reports(folder)
    assert problem is None, problem
    return next(path for path in written if path.suffix == ".html")


def take(page: Path, out: Path) -> list[Path]:
    """Pictures of the first screen of a page, in both colour schemes."""
    from playwright.sync_api import sync_playwright

    browser = shutil.which("chromium") or shutil.which("google-chrome")
    made = []
    with (
        sync_playwright() as started,
        started.chromium.launch(executable_path=browser, args=["--no-sandbox"]) as opened,
    ):
        for scheme in ("light", "dark"):
            shown = opened.new_page(
                viewport={"width": WIDTH, "height": HEIGHT}, color_scheme=scheme, device_scale_factor=1
            )
            shown.goto(page.as_uri())
            made.append(out / f"report-{scheme}.png")
            shown.screenshot(path=made[-1])
    return made


def main() -> None:
    """Write both pictures."""
    with tempfile.TemporaryDirectory() as folder:
        for path in take(write_page(Path(folder)), ROOT / "docs" / "pictures"):
            print(f"{path}: {path.stat().st_size / 1000:.0f} kB")


if __name__ == "__main__":
    main()
