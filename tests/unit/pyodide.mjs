// Runs Python code in Pyodide: node pyodide.mjs PACKAGE CODE PLACE=FOLDER ... The folders of this machine lie at their places.
const [folder, code, ...mounts] = process.argv.slice(2);
const { loadPyodide } = await import(`${folder}/pyodide.mjs`);
const python = await loadPyodide({ env: { HOME: "/tmp", PYTEST_DISABLE_PLUGIN_AUTOLOAD: "1", PYTHONDONTWRITEBYTECODE: "1" } });
for (const [place, root] of mounts.map((mount) => mount.split("="))) {
  python.FS.mkdirTree(place);
  python.FS.mount(python.FS.filesystems.NODEFS, { root }, place);
}
process.exit(python.runPython(code));
