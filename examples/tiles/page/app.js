// The page: a map with tiles from a fleet, and a panel that shows what the fleet does.

import {Fleet} from "./fleet.js";
import {TileMap} from "./map.js";

const fleet = new Fleet();
const map = new TileMap(document.getElementById("map"), fleet);

document.getElementById("asking").addEventListener("change", () => {
  fleet.mode = new FormData(document.getElementById("asking")).get("mode");
  map.readsAgain = document.getElementById("again").checked;
  document.getElementById("tiles").classList.toggle("plain", !document.getElementById("tinted").checked);
});

fleet.start();
