// What MindSpore's Ascend plugin asks of the CANN libraries and uses the answer of, for a dry run without them: memory is the host's, and
// streams, events and contexts are handles that nobody looks into. Everything else is a function that returns 0: see stand_ins.py.
// Built with the string of the old C++ ABI, as the wheel is.
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <map>
#include <memory>
#include <string>
#include <vector>
#include <sys/mman.h>

namespace {
char handle[4096];
int give(void **out) { *out = handle; return 0; }
int give_own(void **out) { *out = std::malloc(64); return 0; }
int reserve(void **out, size_t bytes) {  // nothing is written to it, so nothing is used
  void *memory = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  *out = memory;
  return memory == MAP_FAILED;
}
}  // namespace

extern "C" {
const char *aclrtGetSocName() { return "Ascend910B2"; }
const char *aclGetRecentErrMsg() { return ""; }
int aclrtCreateStream(void **out) { return give(out); }
int aclrtCreateContext(void **out) { return give(out); }
int aclrtGetCurrentContext(void **out) { return give(out); }
int aclrtCreateStreamWithConfig(void **out, uint32_t, uint32_t) { return give_own(out); }
int aclrtCreateEvent(void **out) { return give_own(out); }
int aclrtCreateEventWithFlag(void **out, uint32_t) { return give_own(out); }
int aclrtCreateEventExWithFlag(void **out, uint32_t) { return give_own(out); }
int aclrtGetDevice(int *device) { *device = 0; return 0; }
int aclrtGetDeviceCount(uint32_t *count) { *count = 1; return 0; }
int aclrtGetMemInfo(int, size_t *free, size_t *total) { *free = *total = 60UL << 30; return 0; }
int aclrtDeviceGetStreamPriorityRange(int *least, int *greatest) { *least = 7; *greatest = 0; return 0; }
int aclrtMalloc(void **out, size_t bytes, int) { return reserve(out, bytes); }
int aclrtReserveMemAddress(void **out, size_t bytes, size_t, void *, uint64_t) { return reserve(out, bytes); }
int aclrtMallocPhysical(void **out, size_t, const void *, uint64_t) { return give(out); }
int aclrtMallocHost(void **out, size_t bytes) { *out = std::malloc(bytes); return 0; }
int aclrtFreeHost(void *memory) { std::free(memory); return 0; }
int aclrtMemcpy(void *to, size_t, const void *from, size_t bytes, int) { std::memcpy(to, from, bytes); return 0; }
int aclrtMemcpyAsync(void *to, size_t, const void *from, size_t bytes, int, void *) { std::memcpy(to, from, bytes); return 0; }
int aclrtMemset(void *to, size_t, int value, size_t bytes) { std::memset(to, value, bytes); return 0; }
int aclrtEventElapsedTime(float *milliseconds, void *, void *) { *milliseconds = 0; return 0; }
int aclrtQueryEventStatus(void *, int *status) { *status = 1; return 0; }
int aclrtStreamQuery(void *, int *status) { *status = 0; return 0; }
size_t aclDataTypeSize(int type) {
  static const char bytes[] = {4, 2, 1, 4, 2, 2, 1, 0, 4, 8, 8, 8, 1, 0, 0, 0, 8, 16, 0, 0, 0, 0, 0, 0, 0, 0, 0, 2};
  return type >= 0 && type < 28 ? bytes[type] : 1;
}
void *aclCreateTensorDesc(int, int, const int64_t *, int) { return std::malloc(256); }
void *aclCreateDataBuffer(void *, size_t) { return std::malloc(256); }
void *aclopCreateAttr() { return std::malloc(256); }
void *aclmdlCreateDesc() { return std::malloc(256); }
void *aclmdlCreateDataset() { return std::malloc(256); }
int HcclGetRankId(void *, uint32_t *rank) { *rank = 0; return 0; }
int HcclGetRankSize(void *, uint32_t *size) { *size = std::getenv("RANK_SIZE") ? std::atoi(std::getenv("RANK_SIZE")) : 1; return 0; }
}

// Objects of the graph engine that are made when the plugin is loaded.
namespace ge {
enum Format : int32_t {};
enum DataType : int32_t {};
struct Hidden { std::shared_ptr<int> hidden; };
class StatusFactory {
 public:
  static StatusFactory *Instance();
  std::map<uint32_t, std::string> descriptions;
};
StatusFactory *StatusFactory::Instance() { static auto *factory = new StatusFactory; return factory; }
class Shape : Hidden {
 public:
  Shape();
  explicit Shape(const std::vector<int64_t> &);
  std::vector<int64_t> GetDims() const;
};
Shape::Shape() {}
Shape::Shape(const std::vector<int64_t> &) {}
std::vector<int64_t> Shape::GetDims() const { return {}; }
class TensorDesc : Hidden {
 public:
  TensorDesc();
  TensorDesc(Shape, Format, DataType);
  TensorDesc(const TensorDesc &);
  TensorDesc(TensorDesc &&);
  Shape GetShape() const;
};
TensorDesc::TensorDesc() {}
TensorDesc::TensorDesc(Shape, Format, DataType) {}
TensorDesc::TensorDesc(const TensorDesc &) : Hidden() {}
TensorDesc::TensorDesc(TensorDesc &&) {}
Shape TensorDesc::GetShape() const { return Shape(); }
class Tensor : Hidden {
 public:
  Tensor();
  explicit Tensor(const TensorDesc &);
  Tensor(const TensorDesc &, const uint8_t *, size_t);
  TensorDesc GetTensorDesc() const;
};
Tensor::Tensor() {}
Tensor::Tensor(const TensorDesc &) {}
Tensor::Tensor(const TensorDesc &, const uint8_t *, size_t) {}
TensorDesc Tensor::GetTensorDesc() const { return TensorDesc(); }
class AscendString {
 public:
  explicit AscendString(const char *);
  const char *GetString() const;
  std::shared_ptr<std::string> text;
};
AscendString::AscendString(const char *text) : text(std::make_shared<std::string>(text ? text : "")) {}
const char *AscendString::GetString() const { return text ? text->c_str() : ""; }
class Operator : Hidden {
 public:
  Operator() = default;
  explicit Operator(const std::string &);
  Operator(const std::string &, const std::string &);
  Operator(const AscendString &, const AscendString &);
  virtual ~Operator() = default;
  std::string GetName() const;
  std::string GetOpType() const;
};
Operator::Operator(const std::string &) {}
Operator::Operator(const std::string &, const std::string &) {}
Operator::Operator(const AscendString &, const AscendString &) {}
std::string Operator::GetName() const { return {}; }
std::string Operator::GetOpType() const { return {}; }
class OperatorFactory {
 public:
  static Operator CreateOperator(const std::string &, const std::string &);
  static Operator CreateOperator(const char *, const char *);
  static bool IsExistOp(const std::string &);
  static bool IsExistOp(const char *);
};
Operator OperatorFactory::CreateOperator(const std::string &, const std::string &) { return {}; }
Operator OperatorFactory::CreateOperator(const char *, const char *) { return {}; }
bool OperatorFactory::IsExistOp(const std::string &) { return true; }
bool OperatorFactory::IsExistOp(const char *) { return true; }
}  // namespace ge
