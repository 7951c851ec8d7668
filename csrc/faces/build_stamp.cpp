// What the module was built with, as a text that the loader finds in the file before it opens it (torch_ext/_load.py).
// A file of its own: it is compiled again whenever any source changes.
#include "xla/ffi/api/c_api.h"

#if !defined(ASYNC_EMB_TORCH_VERSION) || !defined(ASYNC_EMB_JAXLIB_VERSION) || !defined(ASYNC_EMB_SOURCES)
#error "the build defines the versions that the module is built against, and the digest of its sources"
#endif

#define ASYNC_EMB_TEXT_OF(number) #number
#define ASYNC_EMB_TEXT(macro) ASYNC_EMB_TEXT_OF(macro)

namespace async_emb::faces {
namespace {

[[gnu::used]] constexpr char kBuildStamp[] =
    "async_emb built with torch=" ASYNC_EMB_TORCH_VERSION " jaxlib=" ASYNC_EMB_JAXLIB_VERSION
    " ffi_api=" ASYNC_EMB_TEXT(XLA_FFI_API_MAJOR) "." ASYNC_EMB_TEXT(XLA_FFI_API_MINOR) " sources=" ASYNC_EMB_SOURCES;

}  // namespace
}  // namespace async_emb::faces
