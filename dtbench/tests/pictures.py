"""The pictures of the pages: `make pictures` takes them of what the commands write from committed files.

Needs a chromium on the PATH. Only the map of links is measured anew, on four ranks of this machine.
"""

import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from PIL import Image
from playwright.sync_api import Browser, sync_playwright
from torch.distributed import init_device_mesh

from dtbench_core import Shard, zeros
from dtbench_core.interop.visualize import sharding_svg
from dtbench_core.simulate import ThreadWorld

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "docs" / "pages" / "pictures"
SCREEN = {"width": 1280, "height": 820}

# Pages as they are, of which the first screen is seen.
PAGES = {"report": "reports/example.html", "gate": "reports/example-gate.html"}
# Commands that write {page}, and what of it is seen.
REPORT = "dtbench report {files} -o {{page}}"
COMMANDS = {
    "calibrate": (
        REPORT.format(files="results/baseline-cpu-gloo-4ranks.topology.json"),
        "#redistribute figure",
    ),
    "buckets": (REPORT.format(files="results/buckets-cpu-2ranks.jsonl"), "#bucketer figure"),
    "ranks": (REPORT.format(files="results/profile/mlp"), "#ranks figure"),
    "stages": (REPORT.format(files="results/profile/add"), "#dispatch figure"),
}


def main() -> None:
    FOLDER.mkdir(exist_ok=True)
    with sync_playwright() as playwright, tempfile.TemporaryDirectory() as folder:
        browser = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        for name, page in PAGES.items():
            take(browser, ROOT / page, name)
        for name, (command, seen) in COMMANDS.items():
            written = Path(folder) / f"{name}.html"
            command = command.format(page=written).replace("dtbench ", f"{sys.executable} -m dtbench ")
            subprocess.run(command, shell=True, cwd=ROOT, check=False)  # 1 where preflight finds a slow link
            take(browser, written, name, seen)
        browser.close()
    with ThreadWorld(8) as world:
        (FOLDER / "sharding.svg").write_text(world.run(sharding)[0])


def sharding() -> str:
    """A tensor cut over both dims of a mesh, as `sharding_svg` draws it."""
    mesh = init_device_mesh("cpu", (2, 4), mesh_dim_names=("dp", "tp"))
    return sharding_svg(zeros((7, 12), device_mesh=mesh, placements=[Shard(0), Shard(1)]))


def take(browser: Browser, path: Path, name: str, seen: str = "") -> None:
    """A picture of the page's first screen, or of one of its elements."""
    page = browser.new_page(viewport=SCREEN)
    page.goto(path.as_uri())
    target = FOLDER / f"{name}.png"
    if seen:
        page.locator(seen).first.screenshot(path=target)
    else:
        page.screenshot(path=target)
    page.close()
    # 256 colours do: half of the bytes.
    Image.open(target).convert("RGB").quantize(256, method=Image.Quantize.FASTOCTREE).save(
        target, optimize=True
    )


if __name__ == "__main__":
    main()
