// A map of tiles that can be dragged and zoomed.

const tileSize = 256;
const minZoom = 0, maxZoom = 30;
const atOnce = 5;     // tiles requested at a time: one less than the connections of a browser to one server
// Around this place there is something to see at every zoom level from this one on.
const start = {x: 0.56621890781552, y: 0.29319620394319, zoom: 3};
const settling = 120; // ms without a move before new tiles are requested: none for tiles that only pass by
const pace = 220;     // ms of an animation
const rest = 1000;    // ms between two reads of tiles that are already shown

const clamp = (v, least, most) => Math.min(Math.max(v, least), most);
const still = matchMedia("(prefers-reduced-motion: reduce)");

export class TileMap {
  readsAgain = true; // as visitors of a busy map do; else no tile is read twice, and there are no hits

  #box;      // the element of the map
  #fleet;
  #view;     // zoom, and x and y of the centre, in a world that is 1 wide and high
  #goal;     // the view at the end of the animation
  #tiles = new Map(); // by name
  #asking = 0;
  #clearing = false;
  #reads = 0; // of tiles that were already shown
  #timer;
  #frame;

  constructor(box, fleet) {
    this.#box = box;
    this.#fleet = fleet;
    this.#view = this.#goal = start;
    new ResizeObserver(() => this.#moved()).observe(box);
    this.#listen();
    setTimeout(() => this.#readAgain(), rest);
  }

  // #all returns the view of the whole set.
  #all() {
    const {clientWidth: w, clientHeight: h} = this.#box;
    return {x: 0.4375, y: 0.5, zoom: Math.max(1, Math.round(Math.log2(Math.min(w, h) / tileSize)))};
  }

  // Moving.

  // pan moves the view by pixels. zoomBy zooms towards a point of the element. Without a point it
  // zooms towards the centre, but from the whole set towards the start: the centre is black.

  pan(dx, dy) {
    const scale = tileSize * 2 ** this.#goal.zoom;
    this.#go({...this.#goal, x: this.#goal.x + dx / scale, y: this.#goal.y + dy / scale});
  }

  zoomBy(levels, point, animated = true) {
    const {x, y, zoom} = this.#goal;
    const next = clamp(zoom + levels, minZoom, maxZoom);
    const all = this.#all();
    if (!point && levels > 0 && x === all.x && y === all.y && zoom === all.zoom) {
      this.#go({...start, zoom: next}, animated);
      return;
    }
    const [dx, dy] = point ? this.#fromCentre(point) : [0, 0];
    const shift = (1 / 2 ** zoom - 1 / 2 ** next) / tileSize;
    this.#go({x: x + dx * shift, y: y + dy * shift, zoom: next}, animated);
  }

  #fromCentre({clientX, clientY}) {
    const box = this.#box.getBoundingClientRect();
    return [clientX - box.left - box.width / 2, clientY - box.top - box.height / 2];
  }

  #go(goal, animated = false) {
    this.#goal = {x: clamp(goal.x, 0, 1), y: clamp(goal.y, 0, 1), zoom: goal.zoom};
    this.#box.ariaBusy = true; // until #update
    cancelAnimationFrame(this.#frame);
    if (!animated || still.matches) {
      this.#view = this.#goal;
      this.#moved();
      return;
    }
    const from = this.#view, begun = performance.now();
    const step = now => {
      const part = clamp((now - begun) / pace, 0, 1);
      const eased = 1 - (1 - part) ** 3;
      const to = this.#goal;
      const zoom = from.zoom + (to.zoom - from.zoom) * eased;
      // The point that the zoom keeps in place moves on a straight line.
      const span = 2 ** -to.zoom - 2 ** -from.zoom;
      const way = span ? (2 ** -zoom - 2 ** -from.zoom) / span : eased;
      this.#view = part < 1 ? {x: from.x + (to.x - from.x) * way, y: from.y + (to.y - from.y) * way, zoom} : to;
      this.#moved();
      if (part < 1) this.#frame = requestAnimationFrame(step);
    };
    this.#frame = requestAnimationFrame(step);
  }

  #listen() {
    const box = this.#box;
    const pointers = new Map();
    box.addEventListener("pointerdown", e => {
      if (e.button || e.target.closest("button")) return;
      box.setPointerCapture(e.pointerId);
      pointers.set(e.pointerId, e);
    });
    box.addEventListener("pointermove", e => {
      const before = pointers.get(e.pointerId);
      if (!before) return;
      const other = [...pointers.values()].find(p => p.pointerId !== e.pointerId);
      this.pan((before.clientX - e.clientX) / pointers.size, (before.clientY - e.clientY) / pointers.size);
      if (other) {
        const distance = p => Math.hypot(p.clientX - other.clientX, p.clientY - other.clientY);
        const middle = {clientX: (e.clientX + other.clientX) / 2, clientY: (e.clientY + other.clientY) / 2};
        this.zoomBy(Math.log2(Math.max(distance(e), 1) / Math.max(distance(before), 1)), middle, false);
      }
      pointers.set(e.pointerId, e);
    });
    for (const end of ["pointerup", "pointercancel"]) {
      box.addEventListener(end, e => pointers.delete(e.pointerId));
    }
    box.addEventListener("wheel", e => {
      e.preventDefault();
      const notch = e.deltaMode !== WheelEvent.DOM_DELTA_PIXEL || Math.abs(e.deltaY) >= 50; // otherwise a touchpad
      this.zoomBy(notch ? -Math.sign(e.deltaY) : -e.deltaY * (e.ctrlKey ? 0.02 : 0.006), e, notch);
    }, {passive: false});
    box.addEventListener("dblclick", e => {
      if (!e.target.closest("button")) this.zoomBy(1, e);
    });
    box.addEventListener("keydown", e => {
      const act = {
        ArrowLeft: () => this.pan(-80, 0), ArrowRight: () => this.pan(80, 0),
        ArrowUp: () => this.pan(0, -80), ArrowDown: () => this.pan(0, 80),
        "+": () => this.zoomBy(1), "=": () => this.zoomBy(1), "-": () => this.zoomBy(-1),
        "0": () => this.#go(this.#all(), true),
      }[e.key];
      if (!act || e.ctrlKey || e.metaKey || e.altKey) return;
      e.preventDefault();
      act();
    });
    const click = (id, act) => document.getElementById(id).addEventListener("click", act);
    click("zoom-in", () => this.zoomBy(1));
    click("zoom-out", () => this.zoomBy(-1));
    click("zoom-all", () => this.#go(this.#all(), true));
    click("clear", () => this.#clear());
  }

  // Tiles.

  #moved() {
    this.#place();
    clearTimeout(this.#timer);
    this.#timer = setTimeout(() => this.#update(), settling);
    const {x, y, zoom} = this.#goal;
    const digits = Math.ceil(zoom * 0.3) + 2;
    const text = `${(4 * x - 2.5).toFixed(digits)} + ${(2 - 4 * y).toFixed(digits)}i, zoom ${zoom.toFixed(zoom % 1 ? 1 : 0)}`;
    document.getElementById("place").textContent = text.replace("+ -", "- ").replaceAll("-", "\u2212");
  }

  // #level is the zoom level of the shown tiles. #visible returns the names of the tiles in the view.

  get #level() { return clamp(Math.round(this.#goal.zoom), minZoom, maxZoom); }

  #visible() {
    const z = this.#level, world = 2 ** z;
    const scale = tileSize * 2 ** (this.#goal.zoom - z);
    const range = (centre, length) => {
      const first = Math.floor(centre * world - length / 2 / scale);
      const last = Math.ceil(centre * world + length / 2 / scale) - 1;
      return [clamp(first, 0, world - 1), clamp(last, 0, world - 1)];
    };
    const [left, right] = range(this.#goal.x, this.#box.clientWidth);
    const [top, bottom] = range(this.#goal.y, this.#box.clientHeight);
    const names = new Set();
    for (let y = top; y <= bottom; y++) {
      for (let x = left; x <= right; x++) names.add(`${z}/${x}/${y}`);
    }
    return names;
  }

  // #update drops the tiles that are no longer visible, and requests the missing ones.
  #update() {
    const visible = this.#visible();
    const complete = [...visible].every(name => this.#tiles.get(name)?.here);
    for (const [name, tile] of this.#tiles) {
      if (visible.has(name)) continue;
      if (!tile.here || complete || tile.z === this.#level) this.#drop(name, tile);
    }
    for (const name of visible) {
      if (!this.#tiles.has(name)) this.#add(name);
    }
    for (const tile of this.#tiles.values()) {
      tile.box.classList.toggle("below", tile.z !== this.#level);
      tile.box.style.zIndex = tile.z === this.#level ? 100 : 50 - Math.abs(tile.z - this.#level);
    }
    this.#place();
    this.#ask();
    this.#box.ariaBusy = !complete || this.#clearing;
    this.#box.dataset.tiles = visible.size;
  }

  #add(name) {
    const [z, x, y] = name.split("/").map(Number);
    const box = document.createElement("div");
    box.className = "tile";
    box.dataset.tile = name;
    this.#tiles.set(name, {name, z, x, y, box, here: false, asked: false, read: 0, gone: new AbortController()});
    document.getElementById("tiles").append(box);
  }

  #drop(name, tile) {
    tile.gone.abort();
    tile.box.remove();
    this.#tiles.delete(name);
  }

  // #clear has the tiles of the shown level computed again.
  async #clear() {
    this.#clearing = true;
    this.#update();
    if (await this.#fleet.clear(this.#level)) {
      for (const [name, tile] of this.#tiles) this.#drop(name, tile);
    }
    this.#clearing = false;
    this.#update();
  }

  // #ask requests the missing tiles, those nearest to the centre first.
  #ask() {
    const {x, y} = this.#goal;
    const distance = t => Math.hypot((t.x + 0.5) / 2 ** t.z - x, (t.y + 0.5) / 2 ** t.z - y);
    const waiting = [...this.#tiles.values()].filter(t => !t.asked).sort((a, b) => distance(a) - distance(b));
    for (const tile of waiting.slice(0, atOnce - this.#asking)) this.#load(tile);
  }

  async #load(tile) {
    tile.asked = true;
    this.#asking++;
    try {
      const answer = await this.#fleet.get(tile.name, tile.gone.signal);
      await this.#show(tile, answer);
    } catch {
      // No process can answer now, or the tile is no longer visible.
      setTimeout(() => { tile.asked = false; this.#ask(); }, 1000);
    }
    this.#asking--;
    this.#update();
  }

  async #show(tile, {picture, process, took}) {
    const img = new Image();
    img.alt = "";
    img.draggable = false;
    img.src = URL.createObjectURL(picture);
    try {
      await img.decode();
    } finally {
      URL.revokeObjectURL(img.src);
    }
    tile.box.append(img, document.createElement("span"));
    this.#label(tile, {process, took});
    tile.box.classList.add("here");
    tile.here = true;
  }

  // #label shows which process computed a tile.
  #label(tile, {process, took}) {
    tile.box.querySelector("span").textContent = `${process} \u00b7 ${took} ms`;
    tile.box.style.setProperty("--who", this.#fleet.colourOf(process));
    tile.box.dataset.process = process;
  }

  // #readAgain reads the visible tile whose last read is the longest ago, while none is missing.
  // The picture of a tile never changes, but another process may have computed it.
  async #readAgain() {
    const shown = [...this.#tiles.values()].filter(t => t.here && t.z === this.#level);
    const tile = shown.sort((a, b) => a.read - b.read)[0];
    if (this.readsAgain && tile && !this.#asking && !document.hidden) {
      tile.read = ++this.#reads;
      try {
        this.#label(tile, await this.#fleet.get(tile.name, tile.gone.signal, true));
      } catch {
        // No process can answer now, or the tile is no longer visible. The tile shows its old label.
      }
    }
    setTimeout(() => this.#readAgain(), rest);
  }

  // #place moves the tiles to their places, on whole pixels, so that there are no gaps.
  #place() {
    const {x, y, zoom} = this.#view;
    const {clientWidth: w, clientHeight: h} = this.#box;
    for (const tile of this.#tiles.values()) {
      const scale = tileSize * 2 ** (zoom - tile.z);
      const left = Math.round((tile.x - x * 2 ** tile.z) * scale + w / 2);
      const right = Math.round((tile.x + 1 - x * 2 ** tile.z) * scale + w / 2);
      const top = Math.round((tile.y - y * 2 ** tile.z) * scale + h / 2);
      const bottom = Math.round((tile.y + 1 - y * 2 ** tile.z) * scale + h / 2);
      tile.box.style.transform = `translate(${left}px, ${top}px)`;
      tile.box.style.width = `${right - left}px`;
      tile.box.style.height = `${bottom - top}px`;
    }
  }
}
