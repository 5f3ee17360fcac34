// Entry of the tensor-parallel finalize, behind its translation unit.
extern "C" int num_early_successors() { return cupy_moe::ptx::early_successors.exchange(0); }

extern "C" void launch(const char* params, int num_blocks, int num_threads, int cluster_size,
                       int smem) {
  using namespace cupy_moe;
  Params p;
  std::memcpy(static_cast<void*>(&p), params, sizeof p);
  using Sums = finalize::RowSums::Storage;
  emulator::launch(num_blocks, num_threads, cluster_size, sizeof(Sums) + smem, [&](char* shared) {
    auto* stash = reinterpret_cast<uint4*>(shared + sizeof(Sums));
    auto& sums = *reinterpret_cast<Sums*>(shared);
    finalize::run(p, stash, sums);
  });
}
