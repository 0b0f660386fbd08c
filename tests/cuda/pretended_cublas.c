/* cuBLAS without a GPU, for pretended_gpu.py: what nvmath-python calls for products of two matrices. It has three
   algorithms, of which a function in Python computes any. */
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

enum { OK = 0, INVALID = 7, ALGORITHMS = 3 };
enum { FLOAT32 = 0, BFLOAT16 = 14, COMPUTE_FLOAT32 = 68 };

typedef struct {
  int type;
  uint64_t rows, columns;
  int64_t stride;
} layout;
typedef struct {
  int compute, scale, transposed;
} description;
typedef struct {
  uint64_t workspace;
  uint32_t reduction, alignments;
} preference;
typedef struct {
  uint64_t algorithm[8];
  size_t workspace;
  int state;
  float waves;
  int reserved[4];
} result;

static int (*multiply)(int algorithm, const uint64_t* addresses, const uint64_t* sizes);

void pretended_products(void* it) { multiply = it; }

size_t cublasLtGetVersion(void) { return 130102; }

/* A handle is the number of the device that was current when it was made, and 1. */
int cuGetProcAddress_v2(const char* name, int (**found)(int*), int version, uint64_t flags, int* status);

static intptr_t current_device(void) {
  int (*device_of_context)(int*) = NULL, device = -1;
  cuGetProcAddress_v2("cuCtxGetDevice", &device_of_context, 13000, 0, NULL);
  device_of_context(&device);
  return device + 1;
}

int cublasLtCreate(intptr_t* handle) {
  *handle = current_device();
  return multiply ? OK : 1;
}

int cublasLtMatmulDescCreate(description** made, int compute, int scale) {
  *made = calloc(1, sizeof **made);
  (*made)->compute = compute, (*made)->scale = scale;
  return OK;
}

int cublasLtMatmulDescSetAttribute(description* own, int name, const void* value, size_t size) {
  enum { TRANSPOSE_A = 3 };
  if (name != TRANSPOSE_A || size != 4) return INVALID;
  memcpy(&own->transposed, value, size);
  return OK;
}

int cublasLtMatmulPreferenceCreate(preference** made) {
  *made = calloc(1, sizeof **made);
  (*made)->reduction = 7;
  return OK;
}

int cublasLtMatmulPreferenceSetAttribute(preference* own, int name, const void* value, size_t size) {
  enum { WORKSPACE = 1, REDUCTION = 3, ALIGNMENT_A = 5, ALIGNMENT_D = 8 };
  uint32_t number = 0;
  if (name == WORKSPACE && size == 8) return memcpy(&own->workspace, value, 8), OK;
  if (size != 4) return INVALID;
  memcpy(&number, value, 4);
  if (name == REDUCTION) return own->reduction = number, OK;
  if (name < ALIGNMENT_A || name > ALIGNMENT_D || number != 16) return INVALID;
  own->alignments++;
  return OK;
}

static long alive;  // layouts

int cublasLtMatrixLayoutCreate(layout** made, int type, uint64_t rows, uint64_t columns, int64_t stride) {
  *made = malloc(sizeof **made);
  **made = (layout){type, rows, columns, stride};
  alive++;
  return OK;
}

int cublasLtMatrixLayoutDestroy(layout* own) {
  free(own);
  alive--;
  return OK;
}

long pretended_layouts(void) { return alive; }

static int is(const layout* own, int type, uint64_t rows, uint64_t columns) {
  return own->type == type && own->rows == rows && own->columns == columns && own->stride == (int64_t)rows;
}

static int fits(const description* how, const layout* a, const layout* b, const layout* c, const layout* d) {
  uint64_t inputs = a->rows, outputs = a->columns, rows = b->columns;
  return how->compute == COMPUTE_FLOAT32 && how->scale == FLOAT32 && how->transposed == 1 &&
         is(a, BFLOAT16, inputs, outputs) && is(b, BFLOAT16, inputs, rows) && c == d &&
         is(d, FLOAT32, outputs, rows);
}

int cublasLtMatmulAlgoGetHeuristic(intptr_t handle, const description* how, const layout* a, const layout* b,
                                   const layout* c, const layout* d, const preference* limits, int asked,
                                   result* found, int* count) {
  if (handle != current_device()) return INVALID;
  if (!fits(how, a, b, c, d) || limits->reduction || limits->alignments != 4 || asked < ALGORITHMS)
    return INVALID;
  for (int i = 0; i < ALGORITHMS; i++) {
    found[i] = (result){.algorithm = {(uint64_t)i}, .workspace = limits->workspace};
  }
  *count = ALGORITHMS;
  return OK;
}

int cublasLtMatmul(intptr_t handle, const description* how, const float* alpha, const void* a,
                   const layout* of_a, const void* b, const layout* of_b, const float* beta, const void* c,
                   const layout* of_c, void* d, const layout* of_d, const uint64_t* algorithm,
                   void* workspace, size_t size, void* stream) {
  if (handle != current_device()) return INVALID;
  if (!fits(how, of_a, of_b, of_c, of_d) || *alpha != 1 || *beta != 0 || c != d) return INVALID;
  if (!workspace || size != 32 << 20 || !stream) return INVALID;
  uint64_t addresses[] = {(uintptr_t)d, (uintptr_t)b, (uintptr_t)a};
  uint64_t sizes[] = {of_b->columns, of_a->columns, of_a->rows};
  return multiply((int)algorithm[0], addresses, sizes);
}
