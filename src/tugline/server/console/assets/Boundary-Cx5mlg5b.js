<<<<<<<< HEAD:src/tugline/server/console/assets/Boundary-Cx5mlg5b.js
import{$ as e,A as t,R as n,V as r,X as i,ct as a,ft as o,j as s,lt as c,nt as l,z as u}from"./index-DuzLyqr2.js";import{n as d}from"./causes-DuqUpUlj.js";var f=r(`<span class="s-3ze3pp"><i aria-hidden="true"></i> </span>`);function p(r,p){c(p,!0);var m=f(),h=e(m),g=l(h,1,!0);o(m),i(e=>{t(h,1,s(p.of),`s-3ze3pp`),n(g,e)},[()=>d(p.of)]),u(r,m),a()}export{p as t};
========
import{$ as e,A as t,R as n,V as r,X as i,ct as a,ft as o,j as s,lt as c,nt as l,z as u}from"./index-BPZTJazR.js";import{n as d}from"./causes-DuqUpUlj.js";var f=r(`<span class="s-3ze3pp"><i aria-hidden="true"></i> </span>`);function p(r,p){c(p,!0);var m=f(),h=e(m),g=l(h,1,!0);o(m),i(e=>{t(h,1,s(p.of),`s-3ze3pp`),n(g,e)},[()=>d(p.of)]),u(r,m),a()}export{p as t};
>>>>>>>> part-compare:src/tugline/server/console/assets/Boundary-TaTiWp2e.js
