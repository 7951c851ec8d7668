// What the processor and its operating system offer.
#pragma once

namespace async_emb::cpu {

bool has_avx2_f16c();
bool has_avx512();  // F, BW, DQ and VL, beside what has_avx2_f16c asks for

}  // namespace async_emb::cpu
