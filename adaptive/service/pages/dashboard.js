"use strict";
// The dashboard: follows the server's events, and fetches the data that they report as changed.

// Milliseconds between two fetches while data keeps changing, and before a retry if the server does not answer.
const EVERY = 1500, AGAIN = 2000;

const stale = new Set();  // the parts that have changed since they were shown
let asking = false, stream = null;

const SHOW = {
  history: async () => showHistory(await call("adaptive/history")),
  adapters: async () => showAdapters(await call("adaptive/adapters"), change),
  storage: async () => showStorage(await call("adaptive/storage")),
  answers: async () => {
    try { await showAnswers(); } catch (error) {
      if (error instanceof NeedsKey) throw error;
      at("no-answers").textContent = error.message;  // for example: another user, without a key
    }
  },
};
const CHANGED = {log: ["history", "answers", "storage"], adapters: ["adapters", "history", "storage"]};

async function refresh(...names) {
  names.forEach(name => stale.add(name));
  if (asking) return;
  asking = true;
  try {
    while (stale.size) {
      const now = [...stale];
      stale.clear();
      await Promise.all(now.map(name => SHOW[name]()));
      await new Promise(done => setTimeout(done, EVERY));
    }
  } catch (error) { fail(error); } finally { asking = false; }
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
    try {
      const answer = await ask("adaptive/events", {signal: mine.signal});
      welcome();
      for await (const [name, data] of eventsOf(answer)) {
        if (name === "now") showNow(JSON.parse(data));
        else if (name === "trainer") showTraining(JSON.parse(data));
        else refresh(...(CHANGED[name] || []));
      }
    } catch (error) {
      if (mine.signal.aborted) return;
      fail(error);
      if (error instanceof NeedsKey) return;
      at("problem").textContent = `The server does not answer (${error.message}); trying again.`;
    }
    await new Promise(done => setTimeout(done, AGAIN));
  }
}

async function change(path) {
  try { await call(path, {method: "POST"}); } catch (error) { fail(error); return; }
  refresh("adapters", "history");
}

at("rollback").onclick = () => change("adaptive/adapters/rollback");
at("older").onclick = () => showOlder().catch(fail);
withKey(follow);
// A hidden page fetches nothing.
document.addEventListener("visibilitychange", () => { if (document.hidden) stream?.abort(); else follow(); });
follow();
