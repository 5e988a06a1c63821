// Put it together: controls, drawing, and asking for news where a board serves the page.

const POLL_SECONDS = 2;

function drawControls() {
  settleChoices();
  const asOptions = (values) => values.map((value) => ({ value, text: value }));
  fillSelect(byId("dataset"), asOptions(datasets()), choice.dataset);
  fillSelect(byId("setting"), asOptions(settings()), choice.setting);
  fillSelect(byId("metric"), metrics().map((m) => ({ value: m.name, text: m.title })), choice.metric);
  drawChips();
  const number = (state) => data.runs.filter((run) => run.state === state).length;
  const others = ["running", "stopped"].filter(number).map((state) => `, ${number(state)} ${state}`);
  const finished = number("finished");
  byId("counts").textContent = `${finished} finished ${finished === 1 ? "run" : "runs"}` + others.join("");
  drawSkipped();
}

function drawChips() {
  const box = byId("methods");
  const methods = groups().map((group) => group.method);
  const key = JSON.stringify([methods, isDark()]);
  if (box.dataset.key !== key) {
    box.dataset.key = key;
    const chips = methods.map((method) => {
      const chip = element("button", { type: "button", class: "chip" }, swatch(method), method);
      chip.dataset.method = method;
      chip.title = "Click: show or hide. Double click: only this one, or all again.";
      chip.addEventListener("click", () => toggleMethod(method));
      chip.addEventListener("dblclick", () => onlyMethod(method, methods));
      return chip;
    });
    box.replaceChildren(...chips);
  }
  for (const chip of box.children) {
    chip.setAttribute("aria-pressed", String(!choice.hidden.has(chip.dataset.method)));
  }
}

function toggleMethod(method) {
  if (!choice.hidden.delete(method)) choice.hidden.add(method);
  drawAll();
}

function onlyMethod(method, methods) {
  const others = methods.filter((other) => other !== method);
  const alone = others.every((other) => choice.hidden.has(other));
  for (const other of others) choice.hidden[alone ? "delete" : "add"](other);
  choice.hidden.delete(method);
  drawAll();
}

function drawSkipped() {
  const { skipped } = data;
  const box = byId("skipped");
  box.hidden = !skipped.length;
  box.replaceChildren(
    skipped.length === 1 ? "Not shown:" : `${skipped.length} things are not shown:`,
    element("ul", {}, ...skipped.map((text) => element("li", { text }))),
  );
}

function drawAll() {
  drawControls();
  byId("toolbar").hidden = !data.runs.length;
  if (!data.runs.length) {
    byId("verdict").textContent = "There is no run to show yet.";
    for (const panel of document.querySelectorAll(".panel")) panel.hidden = true;
    return;
  }
  for (const id of ["comparison", "runs"]) byId(id).hidden = false;
  drawVerdict();
  drawTable();
  drawRuns();
  for (const drawPanel of PANELS) drawPanel();
  fillTheLastRow();
  writeAddress();
}

// A panel that stands alone in its row takes all of it.
function fillTheLastRow() {
  const halves = [...document.querySelectorAll(".panel.half:not([hidden])")];
  for (const [index, panel] of halves.entries()) {
    const alone = index === halves.length - 1 && halves.length % 2 === 1;
    if (panel.classList.contains("alone") === alone) continue;
    panel.classList.toggle("alone", alone);
    const plot = panel.querySelector(".plot:not(.empty)");
    if (plot) Plotly.Plots.resize(plot);
  }
}

function showTheme() {
  byId("theme").setAttribute("aria-pressed", String(isDark()));
}

function changeTheme(theme) {
  setTheme(theme);
  showTheme();
  drawAll();
}

function listen() {
  for (const name of ["dataset", "setting", "metric", "level"]) {
    byId(name).addEventListener("change", (event) => {
      choice[name] = event.target.value;
      drawAll();
    });
  }
  const redraws = {
    "each-seed": drawCurves,
    "cost-axis": drawCost,
    "classes-of": drawClasses,
    "partition-of": drawPartition,
    option: drawOptions,
    "landscape-of": drawLandscape,
    "landscape-where": drawLandscape,
    "embedding-of": drawEmbedding,
    "embedding-by": drawEmbedding,
    "theory-of": drawTheory,
  };
  for (const [id, redraw] of Object.entries(redraws)) byId(id).addEventListener("change", redraw);
  byId("csv").addEventListener("click", downloadCsv);
  byId("theme").addEventListener("click", () => {
    const theme = isDark() ? "light" : "dark";
    rememberTheme(theme);
    changeTheme(theme);
  });
  systemIsDark.addEventListener("change", () => {
    if (!chosenTheme()) changeTheme(systemIsDark.matches ? "dark" : "light");
  });
}

// Ask the board for newer data; it answers 204 while there is none.
async function poll() {
  const live = byId("live");
  live.hidden = false;
  try {
    const answer = await fetch(`data.json?seen=${encodeURIComponent(data.stamp)}`, { cache: "no-store" });
    if (!answer.ok) throw new Error(String(answer.status));
    if (answer.status === 200) {
      data = await answer.json();
      drawAll();
    }
    live.className = "live";
    live.textContent = "live";
  } catch {
    live.className = "live lost";
    live.textContent = "the board does not answer, trying again";
  }
  setTimeout(poll, 1000 * POLL_SECONDS);
}

function start() {
  readAddress();
  showTheme();
  listen();
  drawAll();
  document.body.dataset.ready = "true";
  if (data.poll) poll();
}

start();
