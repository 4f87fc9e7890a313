import sys, time, torch, cula
def run(fn, n=20):
    for _ in range(3): fn(0)
    torch.cuda.synchronize()
    ts=[]
    for i in range(n):
        a,b=torch.cuda.Event(enable_timing=True),torch.cuda.Event(enable_timing=True)
        torch.cuda._sleep(400000)
        a.record(); fn(i); b.record(); torch.cuda.synchronize(); ts.append(a.elapsed_time(b))
    ts.sort(); return ts[len(ts)//2]
dev="cuda"
def kda(T,H):
    sets=[]
    for i in range(3):
        q,k,v=(torch.randn(1,T,H,128,device=dev,dtype=torch.bfloat16) for _ in range(3))
        g=torch.randn(1,T,H,128,device=dev,dtype=torch.bfloat16); beta=torch.randn(1,T,H,device=dev,dtype=torch.bfloat16)
        sets.append((q,k,v,g,beta))
    A=torch.rand(H,device=dev); dt=torch.rand(H,128,device=dev)
    def fn(i):
        q,k,v,g,b=sets[i%3]
        return cula.cula_kda(q,k,v,g,b,use_qk_l2norm_in_kernel=True,use_gate_in_kernel=True,use_beta_sigmoid_in_kernel=True,A_log=A,dt_bias=dt,lower_bound=-5.0,output_final_state=True)
    return run(fn)
print("device", torch.cuda.get_device_name(), torch.__version__)
for T,H in ((8192,96),(8192,64),(8192,32),(32768,8),(1024,32)):
    print(f"kda prefill T{T} H{H}: {kda(T,H):.3f} ms", flush=True)
x=torch.empty(1<<30,device=dev,dtype=torch.uint8); y=torch.empty_like(x)
t=run(lambda i:y.copy_(x)); print(f"copy {2*x.numel()/t*1e-9:.2f} TB/s")
for N in (1,8,32,128,256):
    H=32; S=torch.randn(4*N,H,128,128,device=dev)
    q,k,v=(torch.randn(N,1,H,128,device=dev,dtype=torch.bfloat16) for _ in range(3)); g=torch.randn(N,1,H,128,device=dev,dtype=torch.bfloat16); b=torch.randn(N,1,H,device=dev,dtype=torch.bfloat16); A=torch.rand(H,device=dev); dt=torch.rand(H,128,device=dev)
    idx=[(torch.arange(N,device=dev,dtype=torch.int32)+j*N) for j in range(4)]
    fn=lambda i: cula.cula_decode(q,k,v,S,mode="kda",state_indices=idx[i%4],g=g,beta=b,A_log=A,dt_bias=dt,lower_bound=-5.0,use_qk_l2norm_in_kernel=True,use_gate_in_kernel=True,use_beta_sigmoid_in_kernel=True)
    t=run(fn); gb=2*N*H*65536/1e9
    torch.cuda.synchronize(); t0=time.perf_counter()
    for i in range(200): fn(i)
    cpu=(time.perf_counter()-t0)/200; torch.cuda.synchronize()
    print(f"kda decode N{N}: {t*1e3:.1f} us, {gb/t:.2f} TB/s, host {cpu*1e6:.1f} us/call", flush=True)
