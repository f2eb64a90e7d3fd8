"""The page behind `/docs`: draws `/openapi.json` with nothing fetched from elsewhere."""

from typing import Final

DOCS_HTML: Final = """<!doctype html>
<html lang="en"><meta charset="utf-8"><title>Finback API</title>
<style>
body{font:16px/1.5 system-ui,sans-serif;max-width:56rem;margin:2rem auto;padding:0 1rem}
h2{font-size:1.1rem;margin:2rem 0 .2rem}code,pre{font-family:ui-monospace,monospace}
table{border-collapse:collapse;width:100%;font-size:.9rem}
td{border-top:1px solid #ccc;padding:.25rem .5rem;vertical-align:top}
pre{background:#f3f3f3;padding:.7rem;overflow:auto}.verb{color:#06c;text-transform:uppercase}
</style>
<h1>Finback API</h1><p id="about"></p><div id="paths"></div>
<p>Machine-readable: <a href="/openapi.json">/openapi.json</a></p>
<script>
const el=(tag,text)=>{const node=document.createElement(tag);node.textContent=text??"";return node};
const type=s=>s.type||(s.anyOf||[]).map(type).filter(t=>t!=="null").join(" | ")
  ||(s.$ref||"").split("/").pop()||(s.enum?"enum":"any");
fetch("/openapi.json").then(r=>r.json()).then(api=>{
  document.getElementById("about").textContent=api.info.description;
  const root=document.getElementById("paths");
  for(const [path,verbs] of Object.entries(api.paths))for(const [verb,op] of Object.entries(verbs)){
    const head=el("h2");const v=el("code",verb+" ");v.className="verb";
    head.append(v,el("code",path));root.append(head,el("p",op.summary));
    const ref=op.requestBody?.content["application/json"].schema.$ref;if(!ref)continue;
    const schema=api.components.schemas[ref.split("/").pop()],table=el("table");
    for(const [name,field] of Object.entries(schema.properties||{})){
      const row=el("tr"),cell=el("td");cell.append(el("code",name));
      const needed=(schema.required||[]).includes(name)?"required":"";
      row.append(cell,el("td",type(field)),el("td",needed));table.append(row);
    }
    root.append(table);
  }
  root.append(el("h2","Example"),el("pre",
`curl ${location.origin}/v1/chat/completions -H 'Content-Type: application/json' \\\\
  -d '{"model":"gpt-4o","messages":[{"role":"user","content":"Hello"}]}'`));
});
</script></html>
"""
