// "Plan your run": the page, and below it the worker in which Pyodide runs docs/planner.py.
if (globalThis.document) page(); else worker();

function page() {
  const form = document.querySelector("#plan"), plans = document.querySelector("#plans");
  const button = form.querySelector("button"), status = form.querySelector("[role=status]");
  const fields = [...form.elements].filter((field) => field.name);
  let python = null, timer = null;

  function read() {
    const value = (field) => (field.type === "number" ? field.valueAsNumber : field.value.trim());
    return Object.fromEntries(fields.map((field) => [field.name, value(field)]));
  }

  function open() { // what a link says
    const given = new URLSearchParams(location.hash.slice(1));
    for (const field of fields) if (given.has(field.name)) field.value = given.get(field.name);
    edited();
  }

  function edited() {
    const { config, seq, batch } = read();
    form.elements.model.disabled = config !== "";
    if (!timer) status.textContent = seq * batch ? `${(seq * batch).toLocaleString("en")} tokens per step` : "";
  }

  function stop(said) {
    clearInterval(timer);
    timer = null;
    button.textContent = "Plan";
    status.textContent = said;
  }

  function begin() {
    const started = Date.now(), choices = read();
    let doing = "Loading Python and the library";
    const tell = () => { status.textContent = `${doing} … ${Math.round((Date.now() - started) / 1000)} s`; };
    timer = setInterval(tell, 500);
    button.textContent = "Stop";
    plans.replaceChildren();
    python ??= new Worker(import.meta.url, { type: "module" });
    python.onerror = (event) => {
      python = null;
      stop(`The planner didn't start: ${event.message ?? "a file is missing on this site"}. Reload the page to try again.`);
    };
    python.onmessage = ({ data }) => {
      if (data.doing) { doing = data.doing; return tell(); }
      stop(data.error ? `Not planned: ${data.error}` : `Planned in ${((Date.now() - started) / 1000).toFixed(1)} s.`);
      if (data.plans) show(data, choices);
    };
    python.postMessage(choices);
    tell();
  }

  form.addEventListener("input", edited);
  form.addEventListener("submit", (event) => {
    event.preventDefault();
    if (!timer) return begin();
    python.terminate();
    python = null;
    stop("Stopped.");
  });
  addEventListener("hashchange", open);
  open();
  button.disabled = false;

  function show({ task, plans: found }, choices) {
    if (choices.config) delete choices.model; else delete choices.config;
    history.replaceState(null, "", `#${new URLSearchParams(choices)}`);
    const head = ["", "Plan", "Step", "Error bar", "MFU", "Memory per GPU", "Memory's error bar", "Why it's slower than the first"];
    const rows = found.map((one, k) => [
      `${k + 1}`, one.plan, data(one.seconds, one.step), one.error, one.mfu, data(one.bytes, one.memory), one.memory_error, one.why,
    ]);
    const named = (cell, k) => Object.assign(make("td", cell), { title: head[k] }); // a phone shows it before the cell
    const body = rows.map((row) => make("tr", ...row.map(named)));
    const headline = make("tr", ...head.map((word) => make("th", word)));
    const link = Object.assign(make("a", "A link to this result"), { href: location.href });
    plans.replaceChildren(
      make("table", make("caption", task), make("thead", headline), make("tbody", ...body)),
      make("p", link),
      make("h2", "Commands"),
      make("p", "$LAUNCH, $MODEL, $DATA and $CONFIG stand for your own flags. Lines above a command say what its flags can't."),
      ...found.map((one, k) => details(`${k + 1}. ${one.plan}`, one, k === 0)),
    );
  }

  function details(title, { held, python: plan, commands }, open) {
    const written = Object.entries(commands).flatMap(([name, command]) => [make("h3", name), make("pre", command)]);
    if (!written.length) written.push(make("p", "Megatron-Core and torchtitan don't run on these chips."));
    const all = [make("summary", title), make("p", `${held}.`), ...written, make("h3", "In the course"), make("pre", `theory.${plan}`)];
    return Object.assign(make("details", ...all), { open });
  }

  function data(value, said) {
    return Object.assign(make("data", said), { value });
  }

  function make(tag, ...children) {
    const node = document.createElement(tag);
    node.append(...children);
    return node;
  }
}

function worker() {
  const say = (doing) => postMessage({ doing });
  const ready = start();

  async function start() {
    const folder = new URL("planner/", import.meta.url);
    const library = fetch(new URL("manyranks.zip", folder));
    const { loadPyodide } = await import(new URL("pyodide.mjs", folder));
    const python = await loadPyodide({ indexURL: folder.href });
    python.unpackArchive(await (await library).arrayBuffer(), "zip");
    return python.pyimport("planner").answer;
  }

  onmessage = async ({ data }) => {
    try {
      postMessage(JSON.parse((await ready)(JSON.stringify(data), say)));
    } catch (error) { // a mistake of ours: its last line, without what led there
      postMessage({ error: `${error.message}`.trim().split("\n").at(-1) });
    }
  };
}
