import { mount } from "svelte";
import App from "./App.svelte";
import "./app.css";
import { showTheme } from "./lib/theme.svelte";

showTheme();
mount(App, { target: document.getElementById("app")! });
