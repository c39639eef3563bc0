"use strict";
// The list of answers: shows the drafter of each token, and forgets answers.

// The log's names of drafters and their labels; each has its own style (style.css).
const DRAFTERS = {model: "the draft model", head: "the draft head", history: "history: said before",
  grammar: "the grammar left no choice"};
// Answers fetched at a time.
const PAGE = 15;

const made = (name, text, kind) => {
  const one = document.createElement(name);
  if (text !== undefined) one.textContent = text;
  if (kind) one.className = kind;
  return one;
};

// Rows that are shown already stay in place, with their focus, selection and open boxes. Rows older than those fetched
// stay too, if none is missing in between; `forgot`: some may be deleted, so none of them stays.
async function showAnswers(forgot = false) {
  const list = at("answers-list");
  const found = await call(`adaptive/answers?limit=${Math.min(100, Math.max(PAGE, list.childElementCount))}`);
  const wanted = Math.max(PAGE, list.childElementCount);
  const known = new Map([...list.children].map(row => [row.dataset.answer, row]));
  const rows = found.answers.map(one => known.get(String(one.id)) || rowOf(one));
  const end = !forgot && found.more && rows.some(row => row.isConnected) ? found.answers.at(-1).id : -Infinity;
  const kept = new Set(rows);
  for (const row of known.values()) if (!kept.has(row) && !(row.dataset.answer < end)) row.remove();
  rows.forEach((row, i) => { if (list.children[i] !== row) list.insertBefore(row, list.children[i] || null); });
  let last = list.lastElementChild;
  let more = last === rows.at(-1) ? found.more : !at("older").hidden;
  // As many rows as before, unless the last one is in use.
  const free = row => !row.querySelector(".whole") && !row.contains(document.activeElement) && !at("older").disabled;
  for (; list.childElementCount > wanted && free(last); last = list.lastElementChild) {
    last.remove();
    more = true;
  }
  place(more);
}

async function showOlder() {
  const button = at("older"), focused = document.activeElement === button;
  button.disabled = true;
  try {
    const found = await call(`adaptive/answers?limit=${PAGE}&before=${at("answers-list").lastElementChild.dataset.answer}`);
    at("answers-list").append(...found.answers.map(rowOf));
    place(found.more);
  } finally {
    button.disabled = false;
    if (focused) button.focus();
  }
}

function place(more) {
  const some = at("answers-list").childElementCount > 0;
  at("older").hidden = !more || !some;
  at("no-answers").hidden = some;
}

function rowOf(one) {
  const row = made("li");
  row.dataset.answer = one.id;
  const head = made("div", undefined, "head"), open = made("button", one.asked || "(no question)", "asked");
  open.setAttribute("aria-expanded", "false");
  open.onclick = () => act(() => toggle(row, one.id, open));
  const forget = made("button", "Forget", "quiet"), session = made("button", "Forget its session", "quiet");
  named(forget, open.textContent);
  named(session, one.session);
  forget.onclick = () => act(() => forgetAnswer(one, row));
  session.onclick = () => act(() => forgetSession(one, row));
  const buttons = made("span");
  buttons.append(forget, session);
  head.append(open, buttons);
  const speed = one.tokens_per_second ? `, ${rate(one.tokens_per_second)} a second` : "";
  const each = one.tokens_per_round ? `, ${one.tokens_per_round.toFixed(2)} a round` : "";
  const drafted = one.drafted ? `, ${one.accepted} of ${one.drafted} drafted tokens accepted` : ", nothing drafted";
  row.append(head, made("div", `${new Date(1000 * one.created).toLocaleString()} · session ${one.session} · `
    + `${count(one.tokens, "token", "tokens")}${speed}${each}${drafted}`, "soft"));
  return row;
}

async function toggle(row, id, button) {
  const there = row.querySelector(".whole");
  if (there) there.remove();
  else {
    const found = await call(`adaptive/answers/${id}`);
    const whole = made("div", undefined, "whole");
    whole.append(legendOf(found), tokensOf(found), made("div", inWords(found), "soft"));
    if (!row.querySelector(".whole")) row.append(whole);
  }
  button.setAttribute("aria-expanded", String(!there));
}

// The text with each drafted token as an element of its own, with a style and a title.
function tokensOf(found) {
  const text = made("div", undefined, "said");
  for (const token of found.tokens) {
    if (token.drafter === null) text.append(token.text);
    else {
      const one = made("span", token.text, `token ${token.drafter in DRAFTERS ? token.drafter : "other"}`);
      one.title = `drafted by ${DRAFTERS[token.drafter] || token.drafter}`;
      text.append(one);
    }
  }
  return text;
}

function legendOf(found) {
  const list = made("ul", undefined, "legend");
  for (const name of new Set(found.tokens.map(token => token.drafter))) {
    const entry = made("li");
    if (name === null) entry.append(made("span", "plain"), "the target's own");
    else entry.append(made("span", "drafted", `token ${name in DRAFTERS ? name : "other"}`), `by ${DRAFTERS[name] || name}`);
    list.append(entry);
  }
  return list;
}

function inWords(found) {
  const counts = new Map();
  for (const token of found.tokens) counts.set(token.drafter, (counts.get(token.drafter) || 0) + 1);
  const said = [...counts].map(([name, n]) => `${n} ${name === null ? "by the target" : `drafted by ${DRAFTERS[name] || name}`}`);
  return `Of ${count(found.tokens.length, "token", "tokens")}: ${said.join(", ")}.`
    + (found.adapter ? ` Adapter ${found.adapter}.` : "") + ` Ended: ${found.finish_reason}.`;
}

function confirmed(what) {
  const box = at("confirm");
  at("confirm-what").textContent = what;
  box.returnValue = "no";
  box.showModal();
  return new Promise(done => { box.onclose = () => done(box.returnValue === "yes"); });
}

// Delete what a path names, with its row. The focus, if that row had it, moves to the next one.
async function forget(path, row) {
  const after = [];
  for (let next = row.nextElementSibling; next; next = next.nextElementSibling) after.push(next);
  await call(path, {method: "DELETE"});
  await showAnswers(true);
  if (document.activeElement !== document.body) return;
  const next = after.find(one => one.isConnected);
  (next ? next.querySelector("button.quiet") : at("answers-title")).focus();
}

async function forgetAnswer(one, row) {
  const found = await call(`adaptive/answers/${one.id}/holders`);
  const with_it = found.held_by.length ? `, and ${count(found.held_by.length, "later answer that holds", "later answers that hold")} it in the conversation before` : "";
  if (!await confirmed(`Forget this answer and its question${with_it}?`)) return;
  await forget(`adaptive/answers/${one.id}`, row);
}

async function forgetSession(one, row) {
  const path = "adaptive/sessions/" + encodeURIComponent(one.session);
  const found = await call(path);
  if (!await confirmed(`Forget the session ${one.session}, ${count(found.answers, "answer", "answers")}?`)) return;
  await forget(path, row);
}
