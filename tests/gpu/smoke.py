import torch, cula
from cases import Case, make, ALGORITHMS
import on_cuda, passes
from compare import errors
for alg in ALGORITHMS:
    for dt in (torch.bfloat16, torch.float16):
        for kw in (dict(lengths=(200,)), dict(lengths=(64,)), dict(lengths=(5,70,0,130),packed=True), dict(lengths=(200,),key_dim=128,value_dim=128), dict(lengths=(100,),key_dim=256,value_dim=256)):
            i=make(Case(alg,dtype=dt,**kw))
            ref=passes.prefill(i.double(),backend="reference"); nv=passes.prefill(i,backend="reference:naive")
            for b in ("cpu:amx","cpu:portable"):
                r=passes.prefill(i,backend=b)
                e=[errors(getattr(r,n),getattr(ref,n)).rms for n in ("o","final_state")]; en=[errors(getattr(nv,n),getattr(ref,n)).rms for n in ("o","final_state")]
                bad = any(not (x<=2*y+1e-2 if False else x<=2*y+5e-3) for x,y in zip(e,en))
                print("BAD" if bad else "ok ", alg, str(dt)[6:], kw, on_cuda.BACKENDS[b], ["%.1e"%x for x in e], ["%.1e"%x for x in en], flush=True) if bad or kw.get("key_dim")==128 else None
