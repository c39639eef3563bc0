"use strict";
// The dashboard: follows the server's events, and fetches the data that they report as changed.

// Milliseconds between two fetches while data keeps changing, and before a retry if the server does not answer.
const EVERY = 1500, AGAIN = 2000;
const SILENT = 45000;  // milliseconds after which a connection without the server's pings counts as lost
// Least milliseconds that the error of an action is shown, although new data arrives.
const READ = 10000;

const stale = new Set();  // the parts that have changed since they were shown
const noAnswers = at("no-answers").textContent;
let asking = false, stream = null;

const SHOW = {
  history: async () => showHistory(await call("adaptive/history")),
  adapters: async () => showAdapters(await call("adaptive/adapters"), change),
  storage: async () => showStorage(await call("adaptive/storage")),
  answers: async () => {
    try {
      await showAnswers();
      at("no-answers").textContent = noAnswers;
    } catch (error) {
      if (error.status !== 403) throw error;
      at("no-answers").textContent = error.message;  // another user, without a key
    }
  },
};
const CHANGED = {log: ["history", "answers", "storage"], adapters: ["adapters", "history", "storage"]};

// Fetch and show these parts. Those that fail are fetched again.
async function refresh(...names) {
  names.forEach(name => stale.add(name));
  if (asking) return;
  asking = true;
  let failed = false;
  while (stale.size && !document.hidden) {
    const now = [...stale];
    stale.clear();
    const errors = (await Promise.allSettled(now.map(name => SHOW[name]()))).map(one => one.reason);
    now.filter((_, i) => errors[i]).forEach(name => stale.add(name));
    const error = errors.find(one => one instanceof NeedsKey) || errors.find(Boolean);
    if (error) fail(error);
    else if (failed || Date.now() - told > READ) tell("");
    if (error instanceof NeedsKey) break;  // with the key, follow() asks for every part
    failed = Boolean(error);
    await new Promise(done => setTimeout(done, failed ? AGAIN : EVERY));
  }
  asking = false;
}

function showNow(now) {
  at("pair").textContent = document.title = now.model;
  if (now.state !== "ready") { at("now").textContent = now.state === "loading" ? "loading the models" : now.state; return; }
  const work = now.waiting ? ` · answering, ${now.waiting} waiting` : now.running ? " · answering" : "";
  at("now").textContent = now.speculation.sentence
    + (now.adapter ? " · adapter " + now.adapter : now.draft ? " · no adapter in use" : "") + work;
}

function showTraining(status) {
  at("activity").textContent = status.activity;
  at("activity").className = "state " + status.activity;
  at("training").textContent = status.reason;
  at("share").hidden = status.share === null;
  at("share").value = status.share || 0;
  at("last").textContent = status.last_run ? "Last training run: " + status.last_run : "";
  at("watch").textContent = "Live acceptance: " + status.watch;
}

async function follow() {
  stream?.abort();
  const mine = stream = new AbortController();
  while (!mine.signal.aborted) {
    const line = new AbortController(), end = () => line.abort();
    mine.signal.addEventListener("abort", end);
    let silent;
    const heard = () => { clearTimeout(silent); silent = setTimeout(end, SILENT); };
    try {
      const answer = await ask("adaptive/events", {signal: line.signal});
      welcome();
      heard();
      for await (const [name, data] of eventsOf(answer, heard)) {
        if (name === "now") showNow(JSON.parse(data));
        else if (name === "trainer") showTraining(JSON.parse(data));
        else refresh(...(CHANGED[name] || []));
      }
    } catch (error) {
      if (mine.signal.aborted) return;
      if (error instanceof NeedsKey) return fail(error);
      tell(`The server does not answer (${line.signal.aborted ? "nothing comes any more" : error.message}); trying again.`);
    } finally {
      clearTimeout(silent);
      mine.signal.removeEventListener("abort", end);
    }
    await new Promise(done => setTimeout(done, AGAIN));
  }
}

const change = path => act(async () => {
  await call(path, {method: "POST"});
  refresh("adapters", "history");
});

at("rollback").onclick = () => change("adaptive/adapters/rollback");
at("older").onclick = () => act(showOlder);
withKey(follow);
// A hidden page fetches nothing.
document.addEventListener("visibilitychange", () => { if (document.hidden) stream?.abort(); else follow(); });
follow();
