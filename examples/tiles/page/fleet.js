// The fleet as the page sees it: which process to ask for a tile, and what all processes report.

const element = id => document.getElementById(id);

const life = 5 * 60 * 1000; // ms: Redis can serve a computed tile for at least this long, unless it is killed
const longestLog = 150;

export class Fleet {
  mode = "all"; // or "turn"

  #members = new Map(); // by name, in the order of the fleet
  #turn = 0;
  #asked = 0;
  #failed = 0;
  #computed = 0;
  #twice = 0;
  #unlocked = 0;
  #cleared = 0;     // when a zoom level was cleared
  #computedAt = new Map(); // tile: ms
  #opened = Date.now();

  start() {
    const supervisor = new EventSource("fleet");
    supervisor.onmessage = message => this.#setState(JSON.parse(message.data));
    supervisor.onerror = () => element("notice").textContent = "The command that runs the fleet does not answer.";
    supervisor.onopen = () => element("notice").textContent = "";
    setInterval(() => this.#members.forEach(showStatus), 500);
  }

  // Asking.

  // get resolves with the first answer: the picture, and the process that computed it. It does not
  // ask processes that are known to be down. If a process fails, it asks the next one. With
  // all=true it resolves when every process that it asks has answered.
  async get(tile, signal, all = false) {
    const servers = [...this.#members.values()].filter(m => m.url);
    const up = servers.filter(m => m.pid);
    const asked = up.length ? up : servers;
    if (this.mode === "all") {
      const answers = asked.map(m => this.#ask(m, tile, signal));
      if (all) await Promise.allSettled(answers);
      return Promise.any(answers);
    }
    const first = this.#turn++;
    for (let i = 0; i < asked.length; i++) {
      try {
        return await this.#ask(asked[(first + i) % asked.length], tile, signal);
      } catch (err) {
        if (signal.aborted) throw err;
      }
    }
    throw new Error("no process answered");
  }

  // clear has one of the processes clear a zoom level. It resolves with whether that was done.
  async clear(zoom) {
    const up = [...this.#members.values()].filter(m => m.url && m.pid);
    try {
      const response = await fetch(`${up[0].url}/clear/${zoom}`, {method: "POST"});
      if (!response.ok) throw new Error(await response.text());
      this.#cleared = Date.now();
      return true;
    } catch {
      element("notice").textContent = "The zoom level could not be cleared: try again.";
      return false;
    }
  }

  async #ask(member, tile, signal) {
    this.#asked++;
    this.#showSums();
    try {
      const response = await fetch(`${member.url}/tiles/${tile}`, {signal});
      if (!response.ok) throw new Error(`${member.name} answered ${response.status}`);
      return {
        picture: await response.blob(),
        process: response.headers.get("Tile-Process"),
        took: response.headers.get("Tile-Took"),
      };
    } catch (err) {
      if (!signal.aborted) this.#failed++;
      this.#showSums();
      throw err;
    }
  }

  colourOf(name) { return this.#members.get(name)?.colour ?? "var(--quiet)"; }

  // Reports of the supervisor.

  #setState(states) {
    let processes = 0;
    for (const state of states) {
      let member = this.#members.get(state.name);
      if (!member) {
        member = this.#add(state.name);
      }
      if (member.url) {
        member.colour = `var(--process-${processes++})`;
        member.card.style.setProperty("--who", member.colour);
      }
      if (member.pid && !state.pid) this.#log(member, "was killed", "down");
      if (member.pid === 0 && state.pid) this.#log(member, "is back, and remembers nothing");
      Object.assign(member, state);
      showStatus(member);
    }
  }

  #add(name) {
    const card = element("process").content.firstElementChild.cloneNode(true);
    const member = {name, card, title: name === "redis" ? "Redis" : name};
    this.#members.set(name, member);
    card.dataset.name = name;
    card.querySelector("h2").textContent = member.title;
    const button = card.querySelector("button");
    button.textContent = `Kill ${member.title}`;
    button.disabled = true;
    button.addEventListener("click", () => this.#kill(member));
    if (name === "redis") {
      card.querySelector("dl").remove();
    } else {
      member.url = `http://${location.hostname}:${name}`;
      const events = new EventSource(`${member.url}/events`);
      events.onmessage = message => this.#hear(member, JSON.parse(message.data));
    }
    element("processes").append(card);
    return member;
  }

  async #kill(member) {
    member.card.querySelector("button").disabled = true;
    try {
      await fetch(`kill/${member.name}`, {method: "POST"});
    } catch {
      element("notice").textContent = "The command that runs the fleet does not answer.";
    }
  }

  // Reports of the processes.

  #hear(member, event) {
    switch (event.kind) {
    case "stats":
      for (const dd of member.card.querySelectorAll("dd")) {
        dd.textContent = event.stats[dd.dataset.count];
      }
      member.stats = event.stats;
      showStatus(member);
      this.#showSums();
      break;
    case "load":
      this.#noteLoad(member, event);
      break;
    case "wait":
      this.#log(member, `waited ${event.ms} ms for ${event.tile}`, "", event.at);
      break;
    case "stale":
      this.#log(member, `served an expired ${event.tile} at once`, "", event.at);
      break;
    case "redis":
      if (event.op !== "ping") this.#log(member, "got no answer from Redis", "down", event.at); // a ping comes from the breaker
      break;
    case "breaker":
      this.#log(member, event.open ? "stops asking Redis" : "asks Redis again", event.open ? "down" : "", event.at);
      break;
    }
  }

  #noteLoad(member, event) {
    let what = `computed ${event.tile} in ${event.ms} ms`;
    if (event.error) what = `failed to compute ${event.tile}: ${event.error}`;
    if (event.refresh) what += ", in the background";
    if (event.unlocked) what += ", without Redis";
    this.#log(member, what, "", event.at);
    if (event.error) return;
    const before = this.#computedAt.get(event.tile) ?? 0;
    this.#computedAt.set(event.tile, Math.max(before, event.at));
    if (event.at < this.#opened) return;
    this.#computed++;
    if (event.unlocked) this.#unlocked++;
    // A Redis that was killed has lost its tiles, and so has a level that was cleared.
    const since = Math.max(event.at - life, this.#cleared, this.#members.get("redis")?.since ?? 0);
    if (before >= since && !event.refresh) this.#twice++;
    this.#showSums();
  }

  #showSums() {
    const redisErrors = [...this.#members.values()].reduce((sum, m) => sum + (m.stats?.RedisErrors ?? 0), 0);
    element("note-unlocked").hidden = !this.#unlocked;
    element("note-errors").hidden = !redisErrors;
    element("note-failed").textContent = this.#failed ? `${this.#failed} of ${this.#asked} requests have failed.` : "No request has failed.";
    element("asked").textContent = this.#asked;
    element("failed").textContent = this.#failed;
    element("computed").textContent = this.#computed;
    element("twice").textContent = this.#twice;
    element("unlocked").textContent = this.#unlocked;
  }

  #log(member, what, kind = "", at = Date.now()) {
    const log = element("log");
    const same = [...log.children].slice(0, 10).find(line => line.dataset.what === member.name + what);
    if (same) {
      same.dataset.times = 1 + Number(same.dataset.times);
      same.lastChild.textContent = ` ${what} (${same.dataset.times} times)`;
      return;
    }
    const line = document.createElement("li");
    line.dataset.what = member.name + what;
    line.dataset.times = 1;
    line.className = kind;
    const who = document.createElement("b");
    who.textContent = member.title;
    if (member.colour) who.style.setProperty("--who", member.colour);
    line.append(who, ` ${what}`);
    line.dataset.at = at; // reports arrive a little late, and at a new page all at once
    log.insertBefore(line, [...log.children].find(other => other.dataset.at <= at) ?? null);
    while (log.children.length > longestLog) log.lastElementChild.remove();
  }
}

function showStatus(member) {
  const {card} = member;
  const down = !member.pid;
  let text = `process ${member.pid}`;
  if (member.stats?.BreakerOpen) text = "does not ask Redis now";
  if (down) {
    const seconds = Math.ceil((member.returns - Date.now()) / 1000);
    text = seconds > 0 ? `killed, back in ${seconds} s` : "killed, starting again";
  }
  card.classList.toggle("down", down);
  card.classList.toggle("trouble", !!member.stats?.BreakerOpen);
  const status = card.querySelector(".status");
  if (status.textContent !== text) status.textContent = text;
  card.querySelector("button").disabled = down;
}
