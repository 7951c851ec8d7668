// The torch face of the kernels.
namespace {
// Lets the loader see what the module was built with before it opens it.
[[gnu::used]] constexpr char kBuildStamp[] =
    "async_emb built with torch=" ASYNC_EMB_TORCH_VERSION " jaxlib=" ASYNC_EMB_JAXLIB_VERSION;
}  // namespace
