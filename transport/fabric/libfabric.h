// What of libfabric's binary interface this package uses, declared here from its manual pages, so that building needs
// no header of libfabric and nothing links it. The layouts have been fixed since version 1.5: later versions add
// members behind those that are named here, in structures that the library itself allocates, and functions at the end
// of tables. A structure that ends here with a comment has more members, and is never made by us.
// TestDeclarationsMatchLibfabric compares them with the real headers where they are installed.
#ifndef PACELINE_LIBFABRIC_H
#define PACELINE_LIBFABRIC_H

#include <stddef.h>
#include <stdint.h>
#include <sys/types.h>

#define LF_VERSION ((1u << 16) | 9u) // the version of the interface that is asked for: 1.9

enum {
  LF_EAVAIL = 259, // errors that errno.h does not have
  LF_ENOKEY = 266,
};

#define LF_MSG (1ull << 1)
#define LF_RMA (1ull << 2)
#define LF_READ (1ull << 8)
#define LF_RECV (1ull << 10)
#define LF_SEND (1ull << 11)
#define LF_REMOTE_READ (1ull << 12)
#define LF_CONTEXT (1ull << 59)  // modes: an operation's context is memory that the provider uses
#define LF_CONTEXT2 (1ull << 52)
#define LF_ORDER_SAS (1ull << 8) // sends arrive in order

#define LF_MR_LOCAL (1 << 2)
#define LF_MR_VIRT_ADDR (1 << 4)
#define LF_MR_ALLOCATED (1 << 5)
#define LF_MR_PROV_KEY (1 << 6)
#define LF_MR_ENDPOINT (1 << 9)

enum { LF_THREAD_SAFE = 1, LF_RM_ENABLED = 2, LF_EP_RDM = 3, LF_CQ_FORMAT_MSG = 2, LF_WAIT_NONE = 0, LF_WAIT_FD = 3 };
enum { LF_SOCKADDR_IN = 2, LF_SOCKADDR_IN6 = 3 };    // formats of addresses
enum { LF_CONTROL_GETWAIT = 5, LF_CONTROL_ENABLE = 6 }; // commands of control

struct lf_ops;
struct lf_domain;
struct lf_cq;
struct lf_av;
struct lf_ep;
struct lf_mr;

struct lf_fid { // every object begins with it
  size_t kind;
  void *context;
  struct lf_ops *ops;
};

struct lf_ops {
  size_t size;
  int (*close)(struct lf_fid *);
  int (*bind)(struct lf_fid *, struct lf_fid *, uint64_t flags);
  int (*control)(struct lf_fid *, int command, void *argument);
  // and more
};

struct lf_tx_attr {
  uint64_t caps, mode, op_flags, msg_order, comp_order;
  // and more
};

struct lf_rx_attr {
  uint64_t caps, mode, op_flags, msg_order, comp_order;
  // and more
};

struct lf_ep_attr {
  int type;
  uint32_t protocol;
  // and more
};

struct lf_domain_attr {
  struct lf_domain *domain;
  char *name;
  int threading, control_progress, data_progress, resource_mgmt, av_type, mr_mode;
  size_t mr_key_size;
  // and more
};

struct lf_fabric_attr {
  void *fabric;
  char *name, *prov_name;
  uint32_t prov_version;
  // and more
};

struct lf_info {
  struct lf_info *next;
  uint64_t caps, mode;
  uint32_t addr_format;
  size_t src_addrlen, dest_addrlen;
  void *src_addr, *dest_addr;
  struct lf_fid *handle;
  struct lf_tx_attr *tx_attr;
  struct lf_rx_attr *rx_attr;
  struct lf_ep_attr *ep_attr;
  struct lf_domain_attr *domain_attr;
  struct lf_fabric_attr *fabric_attr;
  // and more
};

struct lf_fabric {
  struct lf_fid fid;
  struct lf_ops_fabric {
    size_t size;
    int (*domain)(struct lf_fabric *, struct lf_info *, struct lf_domain **, void *context);
    int (*passive_ep)(void);
    int (*eq_open)(void);
    int (*wait_open)(void);
    int (*trywait)(struct lf_fabric *, struct lf_fid **, int count);
    // and more
  } *ops;
};

struct lf_av_attr {
  int type, rx_ctx_bits;
  size_t count, ep_per_node;
  const char *name;
  void *map_addr;
  uint64_t flags;
};

struct lf_cq_attr {
  size_t size;
  uint64_t flags;
  int format, wait_obj, signaling_vector, wait_cond;
  void *wait_set;
};

struct lf_domain {
  struct lf_fid fid;
  struct lf_ops_domain {
    size_t size;
    int (*av_open)(struct lf_domain *, struct lf_av_attr *, struct lf_av **, void *context);
    int (*cq_open)(struct lf_domain *, struct lf_cq_attr *, struct lf_cq **, void *context);
    int (*endpoint)(struct lf_domain *, struct lf_info *, struct lf_ep **, void *context);
    // and more
  } *ops;
  struct lf_ops_mr {
    size_t size;
    int (*reg)(struct lf_fid *domain, const void *memory, size_t length, uint64_t access, uint64_t offset,
               uint64_t requested_key, uint64_t flags, struct lf_mr **, void *context);
    // and more
  } *mr;
};

struct lf_mr {
  struct lf_fid fid;
  void *mem_desc;
  uint64_t key;
};

struct lf_av {
  struct lf_fid fid;
  struct lf_ops_av {
    size_t size;
    int (*insert)(struct lf_av *, const void *address, size_t count, uint64_t *number, uint64_t flags, void *context);
    // and more
  } *ops;
};

struct lf_cq_msg_entry {
  void *op_context;
  uint64_t flags;
  size_t len;
};

struct lf_cq_err_entry {
  void *op_context;
  uint64_t flags;
  size_t len;
  void *buf;
  uint64_t data, tag;
  size_t olen;
  int err, prov_errno;
  void *err_data;
  size_t err_data_size;
};

struct lf_cq {
  struct lf_fid fid;
  struct lf_ops_cq {
    size_t size;
    ssize_t (*read)(struct lf_cq *, void *entries, size_t count);
    ssize_t (*readfrom)(void);
    ssize_t (*readerr)(struct lf_cq *, struct lf_cq_err_entry *, uint64_t flags);
    // and more
  } *ops;
};

struct lf_ep {
  struct lf_fid fid;
  void *ops;
  struct lf_ops_cm {
    size_t size;
    int (*setname)(void);
    int (*getname)(struct lf_fid *, void *address, size_t *length);
    // and more
  } *cm;
  struct lf_ops_msg {
    size_t size;
    ssize_t (*recv)(struct lf_ep *, void *memory, size_t length, void *desc, uint64_t from, void *context);
    ssize_t (*recvv)(void);
    ssize_t (*recvmsg)(void);
    ssize_t (*send)(struct lf_ep *, const void *memory, size_t length, void *desc, uint64_t to, void *context);
    // and more
  } *msg;
  struct lf_ops_rma {
    size_t size;
    ssize_t (*read)(struct lf_ep *, void *memory, size_t length, void *desc, uint64_t from, uint64_t address,
                    uint64_t key, void *context);
    // and more
  } *rma;
  // and more
};

#endif
