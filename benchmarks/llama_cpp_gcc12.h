// For building llama.cpp with gcc 12 on a processor with AMX:
//   CMAKE_ARGS="-DLLAVA_BUILD=OFF -DCMAKE_CXX_FLAGS='-include /absolute/path/to/this/file'"
// gcc 12's _tile_loadconfig tells the optimiser of 8 of the 64 bytes that the instruction reads, so the
// others are never written and the first product dies by SIGSEGV. This names all of them.
#include <immintrin.h>
#define _tile_loadconfig(config) \
    __asm__ volatile("ldtilecfg %0" ::"m"(*(const char(*)[64])(config)) : "memory")
