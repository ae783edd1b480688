"""JupyterLab and Notebook 7 in a real browser: the system's Chromium, driven by playwright.

    with lab.open("chapter_03", cells_of("03_zero", "show, theory", "zero.explorer(")) as notebook:
        notebook.run_all()
        assert notebook.errors() == []
        explorer = notebook.explorer()
        for control in explorer.controls():
            before = explorer.picture()
            explorer.move(control)
            assert explorer.picture() != before

Notebook 7, `lab.open(name, cells, notebook_7=True)`, is made of JupyterLab's parts and served beside it.

Whether a test passes is read from JupyterLab's own objects (`window.jupyterapp`), not from the page: a promise that is
kept and a message that is answered say that something has happened, where a click and a pause only hope so.
"""

import contextlib
import json
import os
import secrets
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import nbformat
from nbformat.v4 import new_code_cell, new_notebook
from playwright.sync_api import BrowserContext, Locator, Page, expect, sync_playwright

from tests.conftest import ROOT, free_port

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
ARTIFACTS = ROOT / "artifacts"
SECONDS = 90  # for JupyterLab or a kernel to start, on a busy machine
EXPLORERS = {  # name -> its chapter, and words that pick the cells that it needs
    "chapter_00_explorer": ("00_start_here", "show, theory", "hardware.explorer("),
    "chapter_01_stepper": (
        "01_collectives",
        "show, theory",
        "def numbers(",
        "def exchange(",
        "def ring_reduce_scatter(",
        "home = lambda rows",
        "if not right:\n\n    def reduce_around(",
        "stepper(m.",
    ),
    "chapter_01_explorer": ("01_collectives", "show, theory", "collectives.explorer("),
    "chapter_02_explorer": ("02_data_parallel", "show, theory", "data_parallel.explorer("),
    "chapter_03_explorer": ("03_zero", "show, theory", "zero.explorer("),
    "chapter_04_explorer": ("04_checkpointing", "show, theory", "checkpointing.explorer("),
    "chapter_05_explorer": ("05_pipeline", "show, theory", "pipeline.explorer("),
    "chapter_06_explorer": ("06_tensor", "show, theory", "tensor.explorer("),
    "chapter_07_explorer": ("07_context", "show, theory", "context.explorer("),
    "chapter_08_explorer": ("08_expert", "show, theory", "expert.explorer("),
    "chapter_09_explorer": ("09_mfu", "show, theory", "mfu.explorer("),
    "chapter_10_explorer": ("10_nd_parallel", "show, theory", "nd.explorer("),
    "chapter_11_explorer": ("11_kernels", "show, theory", "kernels.explorer("),
    "chapter_12_explorer": ("12_failures", "show, theory", "failures.explorer("),
}

_BROWSER = ["--disable-gpu", "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1"]  # it can reach nothing else
_SERVER = [
    *("--no-browser", "--ip=127.0.0.1", "--LabApp.expose_app_in_browser=True", "--LabApp.extension_manager=readonly"),
    "--JupyterNotebookApp.expose_app_in_browser=True",
    *("--LabApp.news_url=None", "--LabApp.check_for_updates_class=jupyterlab.NeverCheckForUpdate"),
]
_FOLDERS = ("CONFIG_DIR", "DATA_DIR", "RUNTIME_DIR", "LAB_SETTINGS_DIR", "LAB_WORKSPACES_DIR")
_SETTINGS = {
    "@jupyterlab/notebook-extension/tracker": {"windowingMode": "none"},  # all cells on the page, those out of sight as well
    "@jupyterlab/apputils-extension/notification": {"fetchNews": "false", "checkForUpdates": False},
}

_READY = """() => {
    const panel = window.jupyterapp?.shell.currentWidget;
    return panel?.context?.isReady && panel.sessionContext.session?.kernel?.status === 'idle';
}"""
_SAVED_AND_RESTARTED = """() => jupyterapp.commands.execute('docmanager:save')
    .then(() => jupyterapp.shell.currentWidget.sessionContext.restartKernel())"""
# A kernel answers in the order in which it was asked. So when the empty request is answered every cell has run or was given
# up; the command's own promise is kept as soon as one cell fails, even one that is meant to.
_RUN_ALL = """milliseconds => {
    const kernel = jupyterapp.shell.currentWidget.sessionContext.session.kernel;
    const end = jupyterapp.commands.execute('notebook:run-all-cells')
        .then(() => kernel.requestExecute({code: '', silent: true, stop_on_error: false}).done);
    const late = new Promise((_, refuse) => setTimeout(() => refuse(`no end after ${milliseconds / 1000} s`), milliseconds));
    return Promise.race([end, late]).then(() => null);
}"""
_CODE_CELLS = "[...jupyterapp.shell.currentWidget.content.model.cells].filter(cell => cell.type === 'code')"
_NOT_RUN = f"""() => {_CODE_CELLS}
    .flatMap((cell, k) => cell.executionCount === null && cell.sharedModel.source.trim() ? [k + 1] : [])"""
# JupyterLab draws widgets, or says why it cannot, after the cell has run.
_DRAWN = f"""() => {{
    const bundles = {_CODE_CELLS}.flatMap(cell => cell.outputs.toJSON()).map(output => output.data ?? {{}});
    const views = bundles.filter(data => 'application/vnd.jupyter.widget-view+json' in data);
    const outputs = [...document.querySelectorAll('.jp-Cell-outputArea > * > .jp-OutputArea-output')];
    return outputs.filter(o => o.matches('.jupyter-widgets, :has(> .jupyter-widgets)')).length >= views.length;
}}"""
_ERRORS = f"""() => {{
    const outputs = {_CODE_CELLS}.flatMap(cell => cell.outputs.toJSON());
    const texts = selector => [...document.querySelectorAll(selector)].map(node => node.innerText);
    return [
        ...outputs.filter(o => o.output_type === 'error').map(o => `${{o.ename}}: ${{o.evalue}}`),
        ...outputs.filter(o => o.name === 'stderr').map(o => `stderr: ${{[o.text].flat().join('')}}`),
        ...texts('.widget-output [data-mime-type$=stderr]').map(text => `output widget: ${{text}}`),
        ...texts('.jp-OutputArea-output').filter(text => /^Error .*widget/.test(text)).map(text => `view: ${{text}}`),
        ...texts('.jp-Dialog-content').map(text => `dialog: ${{text}}`),
    ];
}}"""
# A widget has at most one change under way; it sends the next one when that is answered, hence two rounds. The second lasts
# longer than an explorer waits before it redraws. A change is handled by the kernel's main thread or by that for widgets.
_SETTLE = """async () => {
    const kernel = jupyterapp.shell.currentWidget.sessionContext.session.kernel;
    const widgets = [...kernel._comms.values()].find(comm => comm.targetName === 'jupyter.widget');
    for (const code of ['', 'await __import__("asyncio").sleep(0.2)'])
        await Promise.all([null, widgets?.subshellId ?? null].map(thread => {
            kernel.subshellId = thread;
            const answer = kernel.requestExecute({code, silent: true}).done;
            kernel.subshellId = null;
            return answer;
        }));
}"""
_PICTURE = """async image => {
    for (let seen = null; seen !== image.src;) {  // a picture that is being replaced is not the one that was asked for
        seen = image.src;
        await new Promise(go => setTimeout(go, 20));
        await image.decode().catch(() => { seen = null; });  // replaced meanwhile
    }
    const digest = await crypto.subtle.digest('SHA-256', await (await fetch(image.src)).arrayBuffer());
    return Array.from(new Uint8Array(digest, 0, 8)).join(' ');
}"""


@dataclass(frozen=True)
class Explorer:
    """The controls, the status line and the picture of a chapter's explorer."""

    box: Locator

    def controls(self) -> list[Locator]:
        """Its lists, handles of sliders and boxes to tick, from top to bottom."""
        return self.box.locator("select, .noUi-handle, input[type=checkbox]").all()

    def picture(self) -> str:
        """A digest of the picture's file, once the browser has decoded it: an explorer writes equal pixels as equal bytes."""
        return self.box.locator(".widget-image").evaluate(_PICTURE)

    def status(self) -> str:
        """The sentence that says what limits now."""
        return self.box.locator(":scope > .widget-html").first.inner_text().strip()

    def said(self) -> str:
        """The picture's text, for those who cannot see it: the setting, its numbers and what limits."""
        return self.box.locator(".widget-image").get_attribute("title")

    def tiles(self) -> list[str]:
        """The numbers below the picture."""
        return self.box.locator(".manyranks-tiles > div").all_inner_texts()

    def press_button(self, name: str) -> None:
        """Presses the button of this name."""
        self.box.get_by_role("button", name=name, exact=True).click()
        self._settle()

    def seen(self, *acts: Callable[[], None]) -> tuple[list[str], list[str]]:
        """Pictures and status lines, now and after each act."""
        found = [(self.picture(), self.status())]
        for act in acts:
            act()
            found.append((self.picture(), self.status()))
        pictures, lines = zip(*found, strict=True)
        return list(pictures), list(lines)

    def move(self, control: Locator, step: int = 1) -> None:
        """One step of a slider (1 up, -1 down), `step` options further in a list, or the other state of a box to tick."""
        if control.get_attribute("role") == "slider":
            control.press("ArrowRight" if step > 0 else "ArrowLeft")
        elif control.get_attribute("type") == "checkbox":
            control.press("Space")
        else:
            index = control.evaluate("(list, step) => (list.selectedIndex + step + list.length) % list.length", step)
            control.select_option(index=index)
        self._settle()

    def drag(self, handle: Locator, pixels: int) -> None:
        """Moves a slider's handle to the right (to the left if negative) with the mouse."""
        mouse = handle.page.mouse
        for _ in range(5):  # a page that scrolls by itself takes the handle away from under the mouse
            handle.hover()  # waits until the page stands still
            box = handle.bounding_box()
            mouse.down()
            if "noUi-active" in handle.get_attribute("class"):
                break
            mouse.up()
        else:
            raise AssertionError(f"the mouse does not take hold of {handle}")
        mouse.move(box["x"] + box["width"] / 2 + pixels, box["y"] + box["height"] / 2, steps=10)
        mouse.up()
        self._settle()

    def press(self, *keys: str) -> None:
        """Keys as they are typed, to whatever has the focus."""
        for key in keys:
            self.box.page.keyboard.press(key)
        self._settle()

    def tab_to(self, control: Locator) -> None:
        """Tab, as often as it takes until the control has the focus."""
        for _ in range(40):
            if control.evaluate("node => node === document.activeElement"):
                return
            control.page.keyboard.press("Tab")
        raise AssertionError(f"40 times Tab do not lead to {control}")

    def _settle(self) -> None:
        self.box.page.evaluate(_SETTLE)


@dataclass(frozen=True)
class Notebook:
    """A notebook that is open in JupyterLab or Notebook 7, alone in its window."""

    page: Page

    def run_all(self, seconds: float = 150) -> None:
        """Run All Cells, to the end, and widgets drawn. Raises AssertionError with the errors if a cell was not run."""
        self.page.evaluate(_RUN_ALL, seconds * 1000)
        self.page.wait_for_function(_DRAWN)
        left = self.page.evaluate(_NOT_RUN)
        assert left == [], f"code cells {left} did not run: {self.errors()}"

    def errors(self) -> list[str]:
        """All errors, also on purpose: cells' as "name: message", output to stderr, widgets not shown, dialogs."""
        return self.page.evaluate(_ERRORS)

    def reopen(self) -> None:
        """Saves the notebook, restarts its kernel and loads the page again, as who comes back the next morning."""
        self.page.evaluate(_SAVED_AND_RESTARTED)
        self.page.reload()
        self.page.wait_for_function(_READY, timeout=SECONDS * 1000)

    def explorer(self, k: int = 0) -> Explorer:
        """The k-th explorer of the notebook, in view."""
        box = self.page.locator(".manyranks-explorer").nth(k)
        box.scroll_into_view_if_needed()
        expect(box.locator(":scope > :not([class*=widget-])")).to_have_count(0)  # every control has taken its place
        return Explorer(box)

    @contextlib.contextmanager
    def pictured(self, name: str) -> Iterator[None]:
        """Leaves artifacts/<name>.png, or artifacts/<name>_failed.png: the window as it is then."""
        try:
            yield
        except Exception:
            self.screenshot(f"{name}_failed")
            raise
        self.screenshot(name)

    def screenshot(self, name: str) -> None:
        """Writes artifacts/<name>.png: the window as it is now."""
        ARTIFACTS.mkdir(exist_ok=True)
        self.page.screenshot(path=ARTIFACTS / f"{name}.png")


@dataclass(frozen=True)
class Lab:
    """A JupyterLab that is running, and a browser that may use it."""

    address: str
    folder: Path
    browser: BrowserContext

    @contextlib.contextmanager
    def open(self, name: str, cells: list[nbformat.NotebookNode], notebook_7: bool = False) -> Iterator[Notebook]:
        """A notebook of these cells, its kernel idle; it ends with the block. Leaves artifacts/<name>.png, as `pictured`."""
        python = {"kernelspec": {"name": "python3", "display_name": "Python 3"}}
        nbformat.write(new_notebook(cells=cells, metadata=python), self.folder / f"{name}.ipynb")
        page = self.browser.new_page()
        notebook = Notebook(page)
        # In a workspace of its own, so that JupyterLab does not bring back other notebooks.
        place = "notebooks" if notebook_7 else f"lab/workspaces/{name}/tree"
        with contextlib.closing(page), notebook.pictured(name):
            page.goto(f"{self.address}{place}/{name}.ipynb", timeout=SECONDS * 1000)
            page.wait_for_function(_READY, timeout=SECONDS * 1000)
            yield notebook
            page.evaluate("jupyterapp.shell.currentWidget.sessionContext.shutdown()")


def cells_of(chapter: str, *words: str) -> list[nbformat.NotebookNode]:
    """The chapter's code cells that have these words, in its order, without outputs. Each of the words picks one cell."""
    chapter_cells = nbformat.read(ROOT / "notebooks" / f"{chapter}.ipynb", 4).cells
    sources = [cell.source for cell in chapter_cells if cell.cell_type == "code"]
    picked = {word: [k for k, source in enumerate(sources) if word in source] for word in words}
    assert all(len(places) == 1 for places in picked.values()), f"not in one cell of {chapter}: {picked}"
    return [new_code_cell(sources[k]) for k in sorted({k for (k,) in picked.values()})]


def explorers() -> list[nbformat.NotebookNode]:
    """The cells of all explorers, in the order of EXPLORERS."""
    return [cell for words in EXPLORERS.values() for cell in cells_of(*words)]


@contextlib.contextmanager
def start(folder: Path) -> Iterator[Lab]:
    """JupyterLab in an empty folder, which also takes all its state."""
    work = folder / "notebooks"
    work.mkdir()
    token = secrets.token_hex()
    with _browser() as browser, _server(folder, work, token) as address:  # the server ends first, whatever the browser does
        browser.request.get(f"{address}lab", headers={"Authorization": f"token {token}"})  # answered with a cookie
        yield Lab(address, work, browser)


@contextlib.contextmanager
def _server(folder: Path, work: Path, token: str) -> Iterator[str]:
    for plugin, settings in _SETTINGS.items():
        path = folder / "LAB_SETTINGS_DIR" / f"{plugin}.jupyterlab-settings"
        path.parent.mkdir(parents=True)
        path.write_text(json.dumps(settings))
    command = [sys.executable, "-m", "jupyterlab", *_SERVER, f"--port={free_port()}"]
    command += ["--allow-root"] if os.getuid() == 0 else []
    log = folder / "server.log"
    with log.open("w") as out:
        process = subprocess.Popen(command, cwd=work, env=_environment(folder, token), stdout=out, stderr=subprocess.STDOUT)
    try:
        yield _address(process, folder / "RUNTIME_DIR", log)
    finally:
        process.terminate()
        try:
            process.wait(timeout=20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _environment(folder: Path, token: str) -> dict[str, str]:
    """This process's, with nothing of the user's Jupyter and IPython, and with what `make lab` sets."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("JUPYTER", "IPYTHON"))}
    own = {f"JUPYTER{'' if name.startswith('LAB') else '_'}{name}": str(folder / name) for name in _FOLDERS}
    course = {"JUPYTER_CONFIG_PATH": str(ROOT / "docs" / "jupyter"), "IPYTHONDIR": str(folder / "ipython")}
    return kept | own | course | {"JUPYTER_TOKEN": token}


def _address(process: subprocess.Popen, runtime: Path, log: Path) -> str:
    """Where this very process listens: it tries further ports if another has taken the one that was free."""
    deadline = time.monotonic() + SECONDS
    while process.poll() is None and time.monotonic() < deadline:
        with contextlib.suppress(json.JSONDecodeError, OSError):
            told = json.loads((runtime / f"jpserver-{process.pid}.json").read_text())
            socket.create_connection(("127.0.0.1", told["port"]), timeout=5).close()  # it may have told so before it listens
            return told["url"]
        time.sleep(0.1)
    raise RuntimeError(f"JupyterLab did not start:\n{log.read_text()[-2000:]}")


@contextlib.contextmanager
def _browser() -> Iterator[BrowserContext]:
    with sync_playwright() as playwright, playwright.chromium.launch(executable_path=CHROMIUM, args=_BROWSER) as browser:
        context = browser.new_context(viewport={"width": 1280, "height": 2000})
        context.set_default_timeout(30_000)
        yield context
