/* A CUDA driver without a GPU, for pretended_gpu.py: memory is that of the host, and what is put into a stream
   is done at once, or becomes part of a graph if the stream is being captured. Kernels are functions in Python.
   It has what cuda-core calls; everything else reports that it is not supported. */
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { OK = 0, INVALID = 1, NO_MEMORY = 2, NOT_SUPPORTED = 801 };
enum { DEVICES = 2, MOST_RANGES = 1 << 16, MOST_STREAMS = 64 };

static int (*load)(const void* image);  // returns the number of a kernel
static int (*decode)(int kernel, const unsigned* sizes, void** arguments, int dependent);  // of a launch
static void (*run)(int launch);

void pretended_functions(void* load_it, void* decode_it, void* run_it) {
  load = load_it;
  decode = decode_it;
  run = run_it;
}

/* Devices: the context of a device is its number and 1. */

static _Thread_local intptr_t context;

static int done(void) { return OK; }

static int errors[DEVICES + 1];  // of contexts, and of the driver itself

void pretended_error(int device, int error) { errors[device + 1] = error; }

static int initialize(void) { return errors[0]; }
static int synchronize_context(void) { return errors[context]; }

static int set_context(intptr_t own) {
  context = own;
  return OK;
}

static int number(int* found, int value) {
  *found = value;
  return OK;
}

int cuDriverGetVersion(int* found) { return number(found, 13000); }
static int device_count(int* found) { return number(found, DEVICES); }
static int device(int* found, int ordinal) { return ordinal < DEVICES ? number(found, ordinal) : INVALID; }
static int device_of_context(int* found) { return number(found, (int)context - 1); }
static int can_access_peer(int* found) { return number(found, 1); }

static int pointer(intptr_t* found, int device) {
  *found = device + 1;
  return OK;
}

static int get_context(intptr_t* found) { return pointer(found, (int)context - 1); }

static int device_name(char* name, int size) {
  snprintf(name, size, "pretended GPU");
  return OK;
}

static int device_uuid(char* found, int device) {
  memset(found, device, 16);
  return OK;
}

static int device_attribute(int* found, int attribute) {
  enum { MAJOR = 75, MINOR = 76, MEMORY_POOLS = 115 };
  return number(found, attribute == MAJOR ? 9 : attribute == MEMORY_POOLS);
}

static int error_name(int error, const char** name) {
  *name = error == NO_MEMORY ? "CUDA_ERROR_OUT_OF_MEMORY" : "CUDA_ERROR";
  return OK;
}

/* Memory: of a device it is filled with bytes that are NaN as floats. */

static struct {
  char* first;
  size_t size;
  int device;
} ranges[MOST_RANGES];
static size_t num_ranges;
static size_t used, reserved;  // of all pools, which keep what is freed until they are trimmed

static int allocate_host(void** found, size_t size) {
  if (posix_memalign(found, 256, size ? size : 1)) return NO_MEMORY;
  memset(*found, 0xff, size);
  return OK;
}

static int allocate(void** found, size_t size) {
  int error = allocate_host(found, size);
  if (error) return error;
  if (num_ranges == MOST_RANGES) return NO_MEMORY;
  ranges[num_ranges].first = *found;
  ranges[num_ranges].size = size;
  ranges[num_ranges++].device = (int)context - 1;
  used += size;
  if (used > reserved) reserved = used;
  return OK;
}

static int free_memory(void* memory) {
  free(memory);
  return OK;
}

static int free_now(char* memory) {
  for (size_t r = num_ranges; r--;) {
    if (ranges[r].first != memory) continue;
    used -= ranges[r].size;
    ranges[r] = ranges[--num_ranges];
    return free_memory(memory);
  }
  return INVALID;
}

static int trim(void) {
  reserved = used;
  return OK;
}

static int memory_info(size_t* unused, size_t* total) {
  *unused = ((size_t)4 << 30) - reserved;
  *total = (size_t)8 << 30;
  return OK;
}

static int pool_attribute(void* pool, int attribute, uint64_t* value) {
  (void)pool, (void)attribute;
  *value = 0;
  return OK;
}

static int pool_access(int* flags) { return number(flags, 0); }

static int pointer_attributes(unsigned count, const int* attributes, int** data, const char* memory) {
  enum { MEMORY_TYPE = 2, ON_DEVICE = 2, ORDINAL = 9 };
  for (unsigned i = 0; i < count; i++) {
    *data[i] = attributes[i] == MEMORY_TYPE ? ON_DEVICE : 0;
    for (size_t r = 0; attributes[i] == ORDINAL && r < num_ranges; r++) {
      if (memory >= ranges[r].first && memory < ranges[r].first + ranges[r].size) *data[i] = ranges[r].device;
    }
  }
  return OK;
}

static int encode_tiles(uint64_t* map, int type, unsigned rank, void* address, const uint64_t* sizes,
                        const uint64_t* strides, const unsigned* box, const unsigned* steps, int interleave,
                        int swizzle) {
  enum { BFLOAT16 = 9, BY_128_BYTES = 3 };
  (void)steps, (void)interleave;
  if (type != BFLOAT16 || rank != 2 || swizzle != BY_128_BYTES) return INVALID;
  if ((uintptr_t)address % 16 || strides[0] % 16 || box[0] > 64 || box[1] > 256) return INVALID;
  uint64_t words[16] = {(uintptr_t)address, sizes[0], sizes[1], strides[0], box[0], box[1]};
  memcpy(map, words, sizeof words);
  return OK;
}

/* Streams, events and graphs. */

typedef struct {
  int launch;
  void* to;
  const void* from;
  size_t size;
} task;
typedef struct {
  task* tasks;
  size_t count;
} graph;
typedef struct {
  graph* captured;
} stream;
typedef stream event;                 // what it was recorded in, as a stream is captured
static stream* joined[MOST_STREAMS];  // streams that became part of a graph by an event
static int num_joined;

static graph* capturing(const stream* own) { return (uintptr_t)own > 2 ? own->captured : NULL; }

static void do_task(task one) {
  if (one.to)
    memmove(one.to, one.from, one.size);
  else
    run(one.launch);
}

static int put(stream* to, task one) {
  graph* captured = capturing(to);
  if (captured) {
    captured->tasks = realloc(captured->tasks, (captured->count + 1) * sizeof one);
    captured->tasks[captured->count++] = one;
  } else {
    do_task(one);
  }
  return OK;
}

static int copy(void* to, const void* from, size_t size, stream* own) {
  return put(own, (task){0, to, from, size});
}

static int make_stream(stream** found) {
  *found = calloc(1, sizeof **found);
  return *found ? OK : NO_MEMORY;
}

static int free_allocated(char* memory, const stream* own) {
  return capturing(own) ? INVALID : free_now(memory);
}

static int priorities(int* least, int* most) { return number(least, 0) | number(most, -1); }
static int synchronize(stream* own) { return capturing(own) ? INVALID : OK; }
static int is_capturing(stream* own, int* status) { return number(status, capturing(own) != NULL); }

static int capture_info(stream* own, int* status, uint64_t* id, graph** found, void** nodes, void** edges,
                        size_t* count) {
  if (id) *id = 1;
  if (found) *found = capturing(own);
  if (nodes) *nodes = NULL;
  if (edges) *edges = NULL;
  if (count) *count = 0;
  return is_capturing(own, status);
}

static int begin_capture(stream* own) {
  own->captured = calloc(1, sizeof(graph));
  return OK;
}

static int end_capture(stream* own, graph** found) {
  while (num_joined) joined[--num_joined]->captured = NULL;
  *found = own->captured;
  own->captured = NULL;
  return OK;
}

static int instantiate(graph** found, graph* own, int* parameters) {
  parameters[6] = 0;  // the result, behind two pointers and flags
  *found = own;
  return OK;
}

static int launch_graph(graph* own) {
  for (size_t i = 0; i < own->count; i++) do_task(own->tasks[i]);
  return OK;
}

static int record(event* own, stream* in) {
  own->captured = capturing(in);
  return OK;
}

static int wait_for(stream* own, event* other) {
  if (other->captured && !own->captured) {
    own->captured = other->captured;
    joined[num_joined++] = own;
  }
  return OK;
}

static int user_object(void** found, void* own) {
  *found = own;
  return OK;
}

/* Kernels: a library is the number of one, and 1. */

typedef struct {
  int id;
  char pad[4];
  union {
    char bytes[64];
    int number;
  } value;
} attribute;
typedef struct {
  unsigned sizes[7];  // of the grid, of its blocks, of shared memory
  stream* in;
  const attribute* attributes;
  unsigned count;
} configuration;

static int load_library(intptr_t* found, const void* image) { return pointer(found, load(image)); }
static int kernel_of(intptr_t* found, intptr_t library) { return pointer(found, (int)library - 1); }

static int launch_kernel(const configuration* how, intptr_t kernel, void** arguments) {
  enum { DEPENDENT = 6 };
  int dependent = 0;
  for (unsigned i = 0; i < how->count; i++) {
    if (how->attributes[i].id == DEPENDENT) dependent = how->attributes[i].value.number;
  }
  int launch = decode((int)kernel - 1, how->sizes, arguments, dependent);
  return launch < 0 ? INVALID : put(how->in, (task){launch, NULL, NULL, 0});
}

static const struct {
  const char* name;
  void* function;
} functions[] = {
    {"cuInit", initialize},
    {"cuDriverGetVersion", cuDriverGetVersion},
    {"cuGetErrorName", error_name},
    {"cuDeviceGetCount", device_count},
    {"cuDeviceGet", device},
    {"cuDeviceGetName", device_name},
    {"cuDeviceGetUuid", device_uuid},
    {"cuDeviceGetAttribute", device_attribute},
    {"cuDeviceCanAccessPeer", can_access_peer},
    {"cuDeviceGetDefaultMemPool", pointer},
    {"cuDeviceGetMemPool", pointer},
    {"cuDevicePrimaryCtxRetain", pointer},
    {"cuCtxGetCurrent", get_context},
    {"cuCtxSetCurrent", set_context},
    {"cuCtxGetDevice", device_of_context},
    {"cuCtxSynchronize", synchronize_context},
    {"cuCtxGetStreamPriorityRange", priorities},
    {"cuMemPoolSetAttribute", done},
    {"cuMemPoolGetAttribute", pool_attribute},
    {"cuMemPoolSetAccess", done},
    {"cuMemPoolTrimTo", trim},
    {"cuMemPoolGetAccess", pool_access},
    {"cuMemAllocFromPoolAsync", allocate},
    {"cuMemFreeAsync", free_allocated},
    {"cuMemAllocHost", allocate_host},
    {"cuMemFreeHost", free_memory},
    {"cuMemGetInfo", memory_info},
    {"cuMemcpyAsync", copy},
    {"cuPointerGetAttributes", pointer_attributes},
    {"cuTensorMapEncodeTiled", encode_tiles},
    {"cuStreamCreateWithPriority", make_stream},
    {"cuStreamDestroy", free_memory},
    {"cuStreamSynchronize", synchronize},
    {"cuStreamWaitEvent", wait_for},
    {"cuStreamIsCapturing", is_capturing},
    {"cuStreamGetCaptureInfo", capture_info},
    {"cuStreamBeginCapture", begin_capture},
    {"cuStreamEndCapture", end_capture},
    {"cuEventCreate", make_stream},
    {"cuEventDestroy", free_memory},
    {"cuEventRecord", record},
    {"cuEventSynchronize", done},
    {"cuEventQuery", done},
    {"cuGraphInstantiateWithParams", instantiate},
    {"cuGraphLaunch", launch_graph},
    {"cuGraphDestroy", done},
    {"cuGraphExecDestroy", done},
    {"cuUserObjectCreate", user_object},
    {"cuGraphRetainUserObject", done},
    {"cuGraphReleaseUserObject", done},
    {"cuLibraryLoadData", load_library},
    {"cuLibraryGetKernel", kernel_of},
    {"cuKernelSetAttribute", done},
    {"cuLaunchKernelEx", launch_kernel},
};

static int not_supported(void) { return NOT_SUPPORTED; }

int cuGetProcAddress_v2(const char* name, void** found, int version, uint64_t flags, int* status) {
  (void)version, (void)flags;
  if (status) *status = 0;
  *found = not_supported;
  for (size_t i = 0; i < sizeof functions / sizeof *functions; i++) {
    if (!strcmp(name, functions[i].name)) *found = functions[i].function;
  }
  return OK;
}
