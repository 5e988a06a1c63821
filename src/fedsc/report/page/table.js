// The comparison in words and numbers.

const percent = (share) => (share === null || share === undefined ? null : 100 * share);
const fixed = (digits) => (value) => value.toFixed(digits);
const short = (value) => (Math.abs(value) >= 100 ? value.toFixed(0) : String(+value.toPrecision(3)));

const levelName = (level) => `${Math.round(100 * level)} %`;

// The highest accuracy that all methods in view reach, else that any reaches.
function level() {
  if (data.levels.map(String).includes(choice.level)) return choice.level;
  const reached = (test) => data.levels.map(String).filter((at) => visibleGroups()[test]((g) => g.reached[at]));
  return reached("every").at(-1) ?? reached("some").at(-1) ?? String(data.levels.at(-1));
}

const byAccuracy = () =>
  visibleGroups()
    .filter((group) => group.accuracy.last)
    .sort((a, b) => b.accuracy.last[0] - a.accuracy.last[0]);

// A column: its number for a group (for sorting, bold and CSV), and how it is shown.
function columns() {
  const at = level();
  const [first] = byAccuracy();
  const accuracy = (name) => (g) => g.accuracy[name] && g.accuracy[name].map(percent);
  const final = (name, scale = 1) => (g) => {
    const found = g.final[name];
    return found && found.map((value) => (value === null ? null : value * scale));
  };
  const reached = (key, name, scale = 1) => (g) => {
    const found = g.reached[key];
    return found && [found[name] * scale, null, found.seeds < found.of ? `${found.seeds}/${found.of}` : null];
  };
  const traffic = (g) =>
    g.final.bytes_up && g.final.bytes_down && [1e-6 * (g.final.bytes_up[0] + g.final.bytes_down[0])];
  const metric = metricInfo();
  const inTable = ["accuracy", "client_worst", "nearest_prototype", "calibrated", "summed", "tail", "ece"];
  return [
    { key: "seeds", title: "Seeds", value: (g) => [g.counted.length], show: fixed(0), plain: true },
    { key: "last", title: "Last\n%", value: accuracy("last"), show: fixed(2), spread: true },
    { key: "best", title: "Best\n%", value: accuracy("best"), show: fixed(2) },
    { key: "mean", title: "Last 10\nmean, %", value: accuracy("mean_last_10"), show: fixed(2), spread: true },
    {
      ...{ key: "p", title: "p against\nbest", plain: true, less: true },
      value: (g) => first && g !== first && first.p_values[g.method] !== undefined ? [first.p_values[g.method]] : null,
      show: (p) => (p < 0.001 ? "< 0.001" : p.toFixed(3)),
    },
    ...(inTable.includes(metric.name) ? [] : [{
      ...{ key: "metric", title: withUnit(metric.title.replace(/ (?=\S+$)/, "\n"), metric.unit), spread: true, less: metric.less },
      ...{ value: final(metric.name, UNITS[metric.unit] ?? 1), show: short },
    }]),
    { key: "worst", title: "Worst\nclient, %", value: final("client_worst", 100), show: fixed(2) },
    { key: "prototype", title: "Nearest\nproto, %", value: final("nearest_prototype", 100), show: fixed(2) },
    { key: "calibrated", title: "Calibrated\n%", value: final("calibrated", 100), show: fixed(2), spread: true },
    { key: "summed", title: "Summed\n%", value: final("summed", 100), show: fixed(2), spread: true },
    { key: "tail", title: "Tail\n%", value: final("tail", 100), show: fixed(2) },
    { key: "ece", title: "ECE\n%", value: final("ece", 100), show: fixed(2), less: true },
    ...data.levels.map((share) => ({
      ...{ key: `rounds${share}`, title: `Rounds\nto ${levelName(share)}`, less: true },
      ...{ value: reached(String(share), "rounds"), show: short },
    })),
    { key: "bytes", title: `MB to\n${levelName(at)}`, value: reached(at, "bytes", 1e-6), show: short, less: true },
    { key: "seconds", title: `s to\n${levelName(at)}`, value: reached(at, "seconds"), show: short, less: true },
    { key: "traffic", title: "MB a\nround", value: traffic, show: short, less: true },
  ].filter((column) => groups().some((group) => column.value(group)));
}

function badges(group) {
  const runs = runsOf(group.runs);
  const made = [];
  for (const state of ["running", "stopped"]) {
    const such = runs.filter((run) => run.state === state);
    if (!such.length) continue;
    const furthest = such.map((run) => `${run.round.at(-1)} of ${run.rounds}`).join(", ");
    made.push(element("span", { class: "badge", text: state, title: `${furthest} rounds` }));
  }
  if (runs.some((run) => run.diverged)) {
    made.push(element("span", { class: "badge bad", text: "diverged", title: "its loss became infinite" }));
  }
  return made;
}

function sortedGroups(shown) {
  const { column: key, descending } = choice.sort;
  const column = shown.find((c) => c.key === key);
  const value = column ? (g) => column.value(g)?.[0] : (g) => g.method;
  const sign = descending ? -1 : 1;
  return visibleGroups().sort((a, b) => {
    const [x, y] = [value(a), value(b)];
    if (x === undefined || y === undefined) return (x === undefined) - (y === undefined); // missing last
    return sign * (typeof x === "string" ? x.localeCompare(y) : x - y);
  });
}

function drawTable() {
  const shown = columns();
  const table = byId("table");
  const focused = document.activeElement?.dataset?.column; // the head is made anew
  const head = [{ key: "method", title: "Method" }, ...shown].map(({ key, title }) => {
    const order = choice.sort.column !== key ? null : choice.sort.descending ? "descending" : "ascending";
    const button = element("button", { type: "button", text: title, "data-column": key });
    button.addEventListener("click", () => sortBy(key));
    return element("th", { scope: "col", "aria-sort": order }, button);
  });
  const tops = new Map(
    shown.map((column) => {
      const whole = visibleGroups().map(column.value).filter((found) => found && !found[2]);
      const numbers = whole.map(([number]) => number);
      return [column.key, column.less ? Math.min(...numbers) : Math.max(...numbers)];
    }),
  );
  const rows = sortedGroups(shown).map((group) =>
    element(
      "tr",
      {},
      element("th", { scope: "row" }, swatch(group.method), `${group.method} `, ...badges(group)),
      ...shown.map((column) => cell(column, column.value(group), tops.get(column.key))),
    ),
  );
  table.replaceChildren(element("thead", {}, element("tr", {}, ...head)), element("tbody", {}, ...rows));
  if (focused) table.querySelector(`[data-column="${CSS.escape(focused)}"]`)?.focus();
  fillSelect(byId("level"), data.levels.map((at) => ({ value: String(at), text: levelName(at) })), level());
  note(
    "comparison",
    rows.length
      ? "Mean ± standard deviation over seeds; best of each column in bold. “2/3”: only two of three seeds came there, and the mean is theirs."
      : "All methods are switched off: choose one above.",
  );
}

function cell({ show, spread, plain: never }, found, top) {
  if (!found) return element("td", { class: "missing", text: "–" });
  const [value, deviation, seeds] = found;
  const best = !never && !seeds && value === top && visibleGroups().length > 1;
  const made = element("td", { text: show(value), class: best ? "top" : null });
  if (spread && typeof deviation === "number") made.append(element("span", { class: "spread", text: ` ± ${show(deviation)}` }));
  if (seeds) made.append(element("span", { class: "seeds", text: ` ${seeds}` }));
  return made;
}

// A click sorts by a column, the best first; another turns it round.
function sortBy(key) {
  const column = columns().find((c) => c.key === key);
  const descending = choice.sort.column === key ? !choice.sort.descending : Boolean(column && !column.less);
  choice.sort = { column: key, descending };
  drawTable();
  writeAddress();
}

function tableAsCsv() {
  const shown = columns();
  const quoted = (value) => `"${String(value ?? "").replaceAll('"', '""')}"`;
  const oneLine = (title) => title.replaceAll("\n", " ");
  const head = ["data set", "setting", "method", ...shown.flatMap(({ title, spread }) =>
    spread ? [oneLine(title), `${oneLine(title)} sd`] : [oneLine(title)])];
  const rows = sortedGroups(shown).map((group) => [
    ...[group.dataset, group.setting, group.method],
    ...shown.flatMap(({ value, spread }) => {
      const found = value(group) ?? [];
      return spread ? [found[0], found[1]] : [found[0]];
    }),
  ]);
  return [head, ...rows].map((row) => row.map(quoted).join(",")).join("\r\n") + "\r\n";
}

function downloadCsv() {
  const address = URL.createObjectURL(new Blob([tableAsCsv()], { type: "text/csv" }));
  const name = `${choice.dataset}-${choice.setting}.csv`.replace(/[^\w.-]+/g, "_");
  element("a", { href: address, download: name }).click();
  setTimeout(() => URL.revokeObjectURL(address), 1000);
}

// Which is best, by how much, is it significant, what does it cost?
function drawVerdict() {
  const [first, second] = byAccuracy();
  const verdict = byId("verdict");
  if (!first) return verdict.replaceChildren();
  const [mean1, spread1] = first.accuracy.last.map(percent);
  const strong = (text) => element("b", { text });
  const figure = spread1 === null ? mean1.toFixed(2) : `${mean1.toFixed(2)} ± ${spread1.toFixed(2)}`;
  if (!second) return verdict.replaceChildren(strong(first.method), ` reaches ${figure} % test accuracy.`);
  const lead = mean1 - percent(second.accuracy.last[0]);
  const p = first.p_values[second.method];
  const seeds = Math.min(first.counted.length, second.counted.length);
  const certainty =
    p !== undefined
      ? `p = ${p < 0.001 ? "< 0.001" : p.toFixed(3)} over ${seeds} seeds, ${p < 0.05 ? "significant" : "not significant"} at 5 %`
      : seeds < 2 ? "one seed, so nothing can be said of significance" : "no test is possible with these seeds";
  const times = (value, what) =>
    value.toFixed(2) === "1.00" ? `the same ${what}` : `${value.toFixed(2)} times the ${what}`;
  const ratio = (names) => {
    const total = (group) => sum(names.map((name) => group.final[name]?.[0] ?? NaN));
    return total(first) / total(second);
  };
  const [traffic, time] = [ratio(["bytes_up", "bytes_down"]), medianSeconds(first) / medianSeconds(second)];
  const costs = [
    Number.isFinite(traffic) ? times(traffic, "traffic") : null,
    Number.isFinite(time) ? times(time, "time") : null,
  ].filter(Boolean);
  return verdict.replaceChildren(
    ...[strong(first.method), ` is best with ${figure} % test accuracy, `],
    ...[strong(`${lead.toFixed(2)} points`), ` ahead of `, strong(second.method), "."],
    element("small", {
      text: [
        `Paired t-test: ${certainty}.`,
        costs.length ? `Against ${second.method} a round takes ${costs.join(" and ")}.` : null,
        visibleRuns().some((run) => run.state === "running") ? "Runs are still going on." : null,
      ].filter(Boolean).join(" "),
    }),
  );
}

// Without the first round, which pays for warming up.
function medianSeconds(group) {
  const all = runsOf(group.counted).flatMap((run) => (run.series["timing.seconds"] ?? []).slice(run.round.length > 1 ? 1 : 0));
  const sorted = all.filter((value) => value !== null).sort((a, b) => a - b);
  return sorted[Math.floor(sorted.length / 2)] ?? NaN;
}

function drawRuns() {
  const shown = groups().flatMap((g) => runsOf(g.runs));
  const state = (run) =>
    [run.state, run.diverged ? "diverged" : null].filter(Boolean).join(", ");
  byId("runs").querySelector("summary span").textContent = `${shown.length} in this setting`;
  byId("run-table").replaceChildren(
    element("thead", {}, element("tr", {}, ...["Method", "Seed", "State", "Rounds", "Accuracy, %", "Folder"].map((text) =>
      element("th", { scope: "col" }, element("span", { text }))))),
    element("tbody", {}, ...shown.map((run) => {
      const last = percent(run.series.accuracy.at(-1));
      return element("tr", {},
        element("th", { scope: "row" }, swatch(run.method), run.method),
        element("td", { text: run.seed }),
        element("td", { text: state(run) }),
        element("td", { text: `${run.round.at(-1)} of ${run.rounds}` }),
        element("td", { text: last === null ? "–" : last.toFixed(2) }),
        element("td", { class: "text", text: run.path }));
    })),
  );
}
