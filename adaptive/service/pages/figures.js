"use strict";
// Shared by the dashboard and the report: shows the history, adapters, memory and disk in the elements of figures.html.
// The data comes from the server or is part of the report.

const at = id => document.getElementById(id);
const percent = x => x === null ? "–" : (100 * x).toFixed(0) + "%";
// Tokens per second.
const rate = x => x.toFixed(x >= 9.95 ? 0 : x >= .995 ? 1 : 2);
// The same without zeros at its end, for a plot.
const plain = x => String(Number(rate(x)));
percent.unit = plain.unit = .01;
const count = (n, one, several) => `${n} ${n === 1 ? one : several}`;

// Seconds in the largest unit of which these are two or more.
function duration(seconds) {
  const [unit, name] = [[3600, "h"], [60, "min"], [1, "s"]].find(([unit]) => seconds >= 2 * unit || unit === 1);
  return `${(seconds / unit).toFixed(0)} ${name}`;
}

function bytes(n) {
  for (const unit of ["B", "kB", "MB"]) {
    if (n < 1000) return `${n >= 10 || unit === "B" ? n.toFixed(0) : n.toFixed(1)} ${unit}`;
    n /= 1000;
  }
  return `${n.toFixed(1)} GB`;
}

// A plot over the answers. Each of lines: [field of a point of the series, class, name].
function overTime(id, found, empty, format, options, ...lines) {
  const series = found.series;
  lines = lines.filter(([field]) => series.some(point => point[field] !== null));
  if (!lines.length) return drawNothing(at(id), empty);
  const about = series.map(p => (p.generations === 1 ? `answer ${p.last_id}` : `answers ${p.first_id} to ${p.last_id}`)
    + `, ${p.adapter ? "adapter " + p.adapter : "no adapter"}`);
  const last = lines.map(([field, , name]) => {
    const known = series.map(p => p[field]).filter(value => value !== null);
    return `${name} ${format(known[known.length - 1])} at last, between ${format(Math.min(...known))} and ${format(Math.max(...known))}`;
  });
  drawLines(at(id), {said: `By answer, ${series[0].first_id} to ${series[series.length - 1].last_id}: ${last.join("; ")}`,
    points: series.map((p, i) => ({x: p.last_id, about: about[i]})),
    lines: lines.map(([field, kind, name]) => ({values: series.map(p => p[field]), kind, name})),
    swaps: found.swaps.map(s => ({x: s.generation - .5, text: s.after || "none"})), label: "answer", format, ...options});
}

function showHistory(found) {
  const last = found.latest, drafted = last.speculative_decoding.num_draft_tokens;
  const others = "drafted only by trees, history or a grammar, which this figure leaves out";
  const several = last.generations === 1 ? "last answer" : `last ${last.generations} answers`;
  for (const place of document.querySelectorAll(".latest")) place.textContent = last.generations ? several : "none yet";
  at("speed").textContent = last.tokens_per_second ? rate(last.tokens_per_second) : "–";
  at("yield").textContent = last.tokens_per_round ? last.tokens_per_round.toFixed(2) : "–";
  at("acceptance").textContent = percent(drafted ? last.speculative_decoding.draft_acceptance_rate : null);
  at("drafted").textContent = drafted ? `of ${drafted} drafted tokens accepted, ${several}`
    : !last.generations ? "of drafted tokens accepted"
    : last.mean_draft_length > 0 ? `${several}: ${others}` : `nothing drafted, ${several}`;
  at("answers").textContent = found.totals.generations;
  at("answers-tokens").textContent = found.totals.generations ? `, ${count(found.totals.tokens, "token", "tokens")}` : "";
  const [saved, within] = found.saved ? found.saved.text.split(" (") : ["–"];
  at("saved").textContent = saved;
  const some = found.saved && found.saved.answers < found.saved.drafted
    ? ` in ${found.saved.answers} of ${found.saved.drafted} answers` : "";
  at("within").textContent = (within ? "(" + within + " " : "") + "saved against plain decoding" + some + "; "
    + (found.training_seconds ? `training took ${duration(found.training_seconds)}` : "nothing was trained");
  const drafting = found.totals.mean_draft_length > 0 ? `The answers were ${others}.`
    : "Appears with the first answer for which something was drafted.";
  overTime("rate", found, drafting, percent, {most: 1}, ["acceptance_rate", "one", "accepted"]);
  overTime("tokens", found, "Appears with the first answer of two tokens or more.", plain, {},
    ["tokens_per_second", "two", "measured"], ["expected_tokens_per_second", "expected", "expected by the controller"]);
  overTime("lengths", found, "Appears with the first answer of two tokens or more.", plain, {least: 1},
    ["mean_draft_length", "one", "drafted"]);
  const seen = found.positions.filter(p => p.observed);
  if (!seen.length) return drawNothing(at("positions"), drafting);
  drawBars(at("positions"), {label: "position in the draft", format: percent, most: 1,
    said: "Acceptance by position: " + seen.map(p => `${p.position} ${percent(p.accepted / p.observed)}`).join(", "),
    bars: seen.map(p => ({name: p.position, value: p.accepted / p.observed, weight: Math.min(1, .25 + p.observed / 50),
      about: `position ${p.position}: ${p.accepted} of ${p.observed} accepted`}))});
}

// change(path) is the action of an adapter's button; without it there are no buttons.
let shown = "";
function showAdapters(list, change = null) {
  // An unchanged table is not rebuilt, so that a button does not vanish while it is pressed.
  if (shown === JSON.stringify(list)) return;
  shown = JSON.stringify(list);
  const judged = list.filter(a => a.recent);
  const later = "Appears when a training run has ended: the gate compares the new adapter with the draft in use.";
  if (!judged.length) drawNothing(at("gates"), later);
  else drawIntervals(at("gates"), {label: "adapter", format: percent, most: 1,
    said: "Held-out acceptance before and after: " + judged.map(a =>
      `adapter ${a.id} ${percent(a.recent.acceptance_before.mean)} to ${percent(a.recent.acceptance_after.mean)}, ${a.status.replace("_", " ")}`).join("; "),
    rows: judged.map(a => ({name: a.id, before: a.recent.acceptance_before, after: a.recent.acceptance_after,
      about: `adapter ${a.id}, ${a.status.replace("_", " ")}: ${percent(a.recent.acceptance_before.mean)} to `
        + `${percent(a.recent.acceptance_after.mean)} on answers to ${count(a.recent.generations, "prompt", "prompts")}`}))});
  const trained = list.filter(a => a.train_seconds > 0);
  if (!trained.length) drawNothing(at("costs"), "Appears when a training run has ended. Training runs while there is no request.");
  else drawBars(at("costs"), {label: "adapter", format: plain, kind: "two",
    said: "Seconds of training: " + trained.map(a => `adapter ${a.id} ${a.train_seconds.toFixed(0)}`).join(", "),
    bars: trained.map(a => ({name: a.id, value: a.train_seconds,
      about: `adapter ${a.id}: ${a.train_seconds.toFixed(0)} s on ${a.device}, ${count(a.trained_on.generations, "answer", "answers")}`}))});
  const focused = document.activeElement?.dataset.promote;
  at("no-adapters").hidden = list.length > 0;
  at("adapters").closest("table").hidden = list.length === 0;
  at("adapters").replaceChildren(...list.slice().reverse().map(a => {
    const row = document.createElement("tr");
    const cell = text => { const c = row.insertCell(); c.textContent = text; return c; };
    cell(a.id + (a.current ? " in use" : ""));
    cell(a.status.replace("_", " ")).className = a.status;
    const r = a.recent;
    cell(r ? `${percent(r.acceptance_before.mean)} → ${percent(r.acceptance_after.mean)}` : "not judged");
    cell(a.train_seconds ? `${a.train_seconds.toFixed(0)} s, ${count(a.trained_on.generations, "answer", "answers")}` : "–");
    const place = row.insertCell();
    if (!a.current && change) {
      const button = document.createElement("button");
      button.textContent = "Promote";
      button.dataset.promote = a.id;
      button.setAttribute("aria-label", `Promote ${a.id}`);
      button.onclick = () => change(`adaptive/adapters/${a.id}/promote`);
      place.append(button);
    }
    cell(a.reason + (a.speed ? " · " + a.speed : "")).className = "why";
    return row;
  }));
  if (change) at("rollback").disabled = !list.some(a => a.current);
  if (focused) (document.querySelector(`[data-promote="${focused}"]`) || at("rollback")).focus();
}

// found: {memory: [{name, bytes}], disk: [{name, bytes}], memory_free, disk_free, folder}
function showStorage(found) {
  const rows = [];
  for (const [kind, list] of [["in memory", found.memory], ["on the disk", found.disk]]) {
    const most = Math.max(1, ...list.map(one => one.bytes));
    for (const one of list) {
      const name = document.createElement("dt"), share = document.createElement("dd"), size = document.createElement("dd");
      name.textContent = `${one.name}, ${kind}`;
      const bar = document.createElement("meter");
      [bar.max, bar.value] = [most, one.bytes];
      bar.setAttribute("aria-hidden", "true");
      share.append(bar);
      size.textContent = bytes(one.bytes);
      rows.push(name, share, size);
    }
  }
  at("sizes").replaceChildren(...rows);
  const free = found.memory_free === null ? "" : `${bytes(found.memory_free)} of memory and `;
  at("room").textContent = `${found.folder}: ${free}${bytes(found.disk_free)} of disk are free.`;
}
