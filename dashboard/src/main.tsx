import { render } from "preact";
import "./style/tokens.css";
import "./style/page.css";
import "./style/parts.css";
import "./theme";
import { App } from "./app";
import { start } from "./live";

const root = document.getElementById("page");
if (root) {
  start();
  render(<App />, root);
}
