// The playground: asks the gateway beside it and shows where each token came from and where each round's time went.

const byId = (id) => document.getElementById(id);
const PARTS = ["draft_wait_us", "path_us", "queue_us", "pass_us", "sample_us"];
const NAMES = { draft_wait_us: "draft", path_us: "way", queue_us: "queue", pass_us: "pass", sample_us: "sample" };

let messages = []; // of the conversation so far
let last = null; // { body, path, text, heading } of the last answer
let running = null; // AbortController
let shown = null; // the view with the rounds beside the conversation

function element(name, fields = {}, ...children) {
  const made = Object.assign(document.createElement(name), fields);
  made.append(...children);
  return made;
}

function headers() {
  const key = byId("key").value;
  return { "content-type": "application/json", ...(key ? { authorization: `Bearer ${key}` } : {}) };
}

function tell(problem) {
  byId("problem").textContent = problem;
  byId("problem").hidden = !problem;
}

// The data of server-sent events, parsed.
async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    const lines = (rest + value).split("\n");
    rest = lines.pop();
    for (const line of lines)
      if (line.startsWith("data: ") && line !== "data: [DONE]") yield JSON.parse(line.slice(6));
  }
}

async function problemOf(response) {
  let told = response.statusText;
  try { told = (await response.json()).error.message; } catch { /* not in our shape */ }
  if (response.status === 401) return `${told}. Put an API key into the settings.`;
  if (response.status === 429) return `${told}. Try again in a moment.`;
  return `${response.status}: ${told}`;
}

// One answer as it comes: its tokens as spans, and its rounds beside them.
class View {
  constructor(text, aside) {
    this.text = text; // element
    this.aside = aside; // whether the figures beside the conversation are this answer's
    this.letters = []; // code points that no token has yet
    this.taken = 0; // code points before them
    this.tokens = []; // spans
    this.starts = []; // of rounds: index of the first token
    this.firstBase = null;
    this.counts = { draft: 0, lookup: 0, correction: 0, bonus: 0 };
    this.proposed = this.accepted = this.longest = 0;
    this.begun = performance.now();
    this.first = null;
    this.waiting = []; // elements to append at the next frame
    this.newRounds = [];
  }

  take(choice) {
    this.first ??= performance.now();
    this.letters.push(...(choice.delta?.content ?? choice.text ?? ""));
    const told = choice.specdec ?? { origins: [], rounds: [], text_ends: [] };
    told.rounds.forEach((round) => this.takeRound(round));
    told.origins.forEach((origin, at) => {
      const size = told.text_ends[at] - this.taken;
      const span = element("span", { className: "token", textContent: this.letters.splice(0, size).join("") });
      span.dataset.origin = origin;
      span.dataset.token = this.tokens.length;
      this.taken = told.text_ends[at];
      this.counts[origin] += 1;
      this.tokens.push(span);
      this.waiting.push(span);
    });
    this.frame ??= requestAnimationFrame(() => this.show());
  }

  takeRound(round) {
    this.firstBase ??= round.base;
    this.starts.push(round.base - this.firstBase);
    this.proposed += round.num_draft_tokens;
    this.accepted += round.num_accepted_tokens;
    this.longest = Math.max(this.longest, total(round));
    this.newRounds.push(round);
  }

  show() {
    this.frame = null;
    this.text.append(...this.waiting.splice(0));
    byId("log").scrollTop = byId("log").scrollHeight;
    if (!this.aside) return;
    const list = byId("rounds");
    list.append(...this.newRounds.splice(0).map(row));
    list.style.setProperty("--longest", this.longest);
    list.scrollTop = list.scrollHeight;
    for (const output of document.querySelectorAll("[data-count]"))
      output.textContent = this.counts[output.dataset.count];
    const seconds = ((this.ended ?? performance.now()) - this.begun) / 1e3;
    figure("rate", (this.tokens.length / seconds).toFixed(1));
    figure("length", this.starts.length ? (this.tokens.length / this.starts.length).toFixed(2) : "–");
    figure("accepted", this.proposed ? `${this.accepted} of ${this.proposed}` : "–");
    figure("first", `${Math.round(this.first - this.begun)} ms`);
  }

  end() {
    if (this.letters.length) this.waiting.push(this.letters.splice(0).join(""));
    if (this.frame) cancelAnimationFrame(this.frame);
    this.ended = performance.now();
    this.first ??= performance.now();
    this.show();
  }
}

const total = (round) => PARTS.reduce((sum, part) => sum + round[part], 0);

function row(round) {
  const bar = element("span", { className: "bar" });
  for (const part of PARTS) {
    const piece = element("i");
    piece.dataset.part = part;
    piece.style.width = `calc(100% * ${round[part]} / max(1, var(--longest)))`;
    bar.append(piece);
  }
  const refused = round.num_draft_tokens - round.num_accepted_tokens;
  const dots = "●".repeat(round.num_accepted_tokens) + "○".repeat(refused);
  const took = `${(total(round) / 1e3).toFixed(1)} ms`;
  const told = PARTS.map((part) => `${NAMES[part]} ${(round[part] / 1e3).toFixed(1)} ms`).join(", ");
  const item = element(
    "li",
    { title: `round ${round.round}: ${round.num_accepted_tokens} of ${round.num_draft_tokens} accepted; ${told}` },
    bar,
    element("span", { className: "dots", textContent: dots }),
    element("span", { className: "took", textContent: took }),
  );
  item.dataset.round = round.round;
  return item;
}

function figure(name, value) {
  document.querySelector(`[data-figure="${name}"]`).textContent = value;
}

// Hover on a token lights up its round, and all tokens of this round. The rounds shown are those of the last answer.
function light(view, span) {
  for (const lit of document.querySelectorAll(".lit")) lit.classList.remove("lit");
  if (!span || view !== shown) return;
  const token = Number(span.dataset.token);
  let round = view.starts.findLastIndex((start) => start <= token);
  if (round < 0) return;
  view.tokens.slice(view.starts[round], view.starts[round + 1]).forEach((each) => each.classList.add("lit"));
  const item = byId("rounds").children[round];
  item?.classList.add("lit");
  item?.scrollIntoView({ block: "nearest" });
}

async function run(path, body, view) {
  running = new AbortController();
  busy(true);
  try {
    const response = await fetch(path, {
      method: "POST", headers: headers(), body: JSON.stringify(body), signal: running.signal,
    });
    if (!response.ok) { tell(await problemOf(response)); return false; }
    for await (const event of events(response)) {
      if (event.error) { tell(event.error.message); return false; }
      if (event.choices?.length) view.take(event.choices[0]);
    }
    return true;
  } catch (error) {
    if (error.name !== "AbortError") tell(`The gateway cannot be reached: ${error.message}`);
    return false;
  } finally {
    view.end();
    running = null;
    busy(false);
  }
}

function busy(is) {
  byId("send").disabled = is;
  byId("stop").disabled = !is;
  byId("compare").disabled = is || !last;
}

function number(id) {
  const value = byId(id).value;
  return value === "" ? null : Number(value);
}

function bodyOf(prompt) {
  const chat = byId("mode").value === "chat";
  const seed = number("seed") ?? crypto.getRandomValues(new Uint32Array(1))[0];
  const body = {
    stream: true, return_origins: true, seed,
    temperature: number("temperature"), max_tokens: number("max-tokens"), num_draft_tokens: number("draft-tokens"),
  };
  const schema = byId("schema").value.trim();
  if (schema) body.structured_outputs = { json: schema };
  if (!chat) return ["v1/completions", { ...body, prompt }];
  const system = byId("system").value.trim();
  const before = system ? [{ role: "system", content: system }] : [];
  return ["v1/chat/completions", { ...body, messages: [...before, ...messages, { role: "user", content: prompt }] }];
}

function turn(who, ...children) {
  byId("log").querySelector(".hint")?.remove();
  const made = element("div", { className: "turn" }, element("h3", { textContent: who }), ...children);
  byId("log").append(made);
  return made;
}

function watched(view) {
  view.text.addEventListener("pointerover", (event) => light(view, event.target.closest(".token")));
  view.text.addEventListener("pointerleave", () => light(view, null));
  return view;
}

async function ask(event) {
  event?.preventDefault();
  const prompt = byId("prompt").value;
  if (running || !prompt) return;
  tell("");
  const [path, body] = bodyOf(prompt);
  turn("you", element("p", { textContent: prompt }));
  const text = element("p");
  const made = turn(`answer, seed ${body.seed}`, text);
  byId("rounds").replaceChildren();
  const view = (shown = watched(new View(text, true)));
  last = null;
  const whole = await run(path, body, view);
  if (!view.tokens.length) {
    made.remove();
    return;
  }
  last = { path, body, text, made, view, whole };
  if (body.messages) messages.push({ role: "user", content: prompt }, { role: "assistant", content: text.textContent });
  byId("prompt").select();
  busy(false);
}

async function compare() {
  if (running || !last) return;
  tell("");
  const { path, body, text, made, view, whole } = last;
  const other = element("p");
  const pair = element("div", { className: "pair" });
  text.replaceWith(pair);
  pair.append(
    element("div", {}, element("h3", { textContent: "with speculation" }), text),
    element("div", {}, element("h3", { textContent: "without" }), other),
  );
  const alone = new View(other, false);
  const ended = await run(path, { ...body, num_draft_tokens: 0 }, alone);
  if (!ended) return;
  const [one, two] = [text.textContent, other.textContent];
  const same = whole ? one === two : two.startsWith(one);
  const rate = (each) => (each.tokens.length / (each.ended - each.begun)) * 1e3;
  const verdict = element("p", {
    className: "verdict",
    textContent: same
      ? `identical: ${alone.tokens.length} tokens, the same ones without speculation (${rate(alone).toFixed(1)} per second)`
      : "the texts differ",
  });
  verdict.dataset.same = same;
  made.append(verdict);
  last = null;
  busy(false);
  byId("log").scrollTop = byId("log").scrollHeight;
}

function clear() {
  running?.abort();
  messages = [];
  last = null;
  byId("log").replaceChildren();
  byId("rounds").replaceChildren();
  tell("");
  busy(false);
  byId("prompt").focus();
}

async function describe() {
  try {
    const response = await fetch("v1/models", { headers: headers() });
    if (!response.ok) { byId("model").textContent = ""; tell(await problemOf(response)); return; }
    const [model] = (await response.json()).data;
    byId("model").textContent = `${model.id}, ${model.max_model_len.toLocaleString("en")} tokens of context`;
    tell("");
  } catch (error) {
    tell(`The gateway cannot be reached: ${error.message}`);
  }
}

byId("ask").addEventListener("submit", ask);
byId("stop").addEventListener("click", () => running?.abort());
byId("compare").addEventListener("click", compare);
byId("clear").addEventListener("click", clear);
byId("mode").addEventListener("change", clear);
document.addEventListener("keydown", (event) => {
  if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) ask(event);
  if (event.key === "Escape") running?.abort();
});
byId("key").value = sessionStorage.getItem("key") ?? "";
byId("key").addEventListener("change", () => {
  sessionStorage.setItem("key", byId("key").value);
  describe();
});
describe();
