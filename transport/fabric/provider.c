#define _GNU_SOURCE
#include "provider.h"

#include <dlfcn.h>
#include <errno.h>
#include <pthread.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>

static struct {
  int (*getinfo)(uint32_t version, const char *node, const char *service, uint64_t flags, const struct lf_info *hints,
                 struct lf_info **info);
  void (*freeinfo)(struct lf_info *);
  struct lf_info *(*dupinfo)(const struct lf_info *);
  int (*fabric)(struct lf_fabric_attr *, struct lf_fabric **, void *context);
  const char *(*strerror)(int);
} library;

// Libraries of providers replace the handlers of some signals as they are loaded, to clean up when the process crashes.
// The runtimes of Go and Python need theirs.
#define HANDLERS 32

static void keep_handlers(struct sigaction *kept) {
  for (int s = 1; s < HANDLERS; s++) sigaction(s, NULL, &kept[s]);
}

static void restore_handlers(const struct sigaction *kept) {
  for (int s = 1; s < HANDLERS; s++) {
    struct sigaction now;
    if (sigaction(s, NULL, &now) == 0 && now.sa_sigaction != kept[s].sa_sigaction) sigaction(s, &kept[s], NULL);
  }
}

static const char *load_error;

static void load(void) {
  struct sigaction kept[HANDLERS];
  keep_handlers(kept);
  void *handle = dlopen("libfabric.so.1", RTLD_NOW | RTLD_LOCAL);
  restore_handlers(kept);
  if (!handle) {
    const char *text = dlerror();
    load_error = strdup(text ? text : "libfabric.so.1 cannot be loaded");
    return;
  }
  struct {
    const char *name;
    void *pointer;
  } symbols[] = {{"fi_getinfo", &library.getinfo},
                 {"fi_freeinfo", &library.freeinfo},
                 {"fi_dupinfo", &library.dupinfo},
                 {"fi_fabric", &library.fabric},
                 {"fi_strerror", &library.strerror}};
  for (size_t i = 0; i < sizeof(symbols) / sizeof(symbols[0]); i++) {
    void *found = dlsym(handle, symbols[i].name);
    if (!found) {
      load_error = "libfabric.so.1 lacks a function of version 1.5";
      return;
    }
    memcpy(symbols[i].pointer, &found, sizeof(found));
  }
}

const char *pf_load(void) {
  static pthread_once_t once = PTHREAD_ONCE_INIT;
  pthread_once(&once, load);
  return load_error;
}

const char *pf_strerror(int error) { return library.strerror(-error); }

int pf_find(const char *provider, struct lf_info **list) {
  struct lf_info *hints = library.dupinfo(NULL);
  if (!hints) return -ENOMEM;
  hints->caps = LF_MSG | LF_RMA;
  hints->mode = LF_CONTEXT | LF_CONTEXT2;
  hints->ep_attr->type = LF_EP_RDM;
  hints->domain_attr->threading = LF_THREAD_SAFE;
  hints->domain_attr->resource_mgmt = LF_RM_ENABLED;
  hints->domain_attr->mr_mode = LF_MR_LOCAL | LF_MR_VIRT_ADDR | LF_MR_ALLOCATED | LF_MR_PROV_KEY | LF_MR_ENDPOINT;
  hints->tx_attr->msg_order = hints->rx_attr->msg_order = LF_ORDER_SAS;
  if (provider) {
    hints->fabric_attr->prov_name = strdup(provider); // freeinfo frees it
    // The memory of another process is read through that process: then it need not allow to be traced, and bytes that
    // it has taken back are not read any more.
    if (strcmp(provider, "shm") == 0) setenv("FI_SHM_DISABLE_CMA", "1", 0);
  }
  struct sigaction kept[HANDLERS];
  keep_handlers(kept);
  int error = library.getinfo(LF_VERSION, NULL, NULL, 0, hints, list);
  restore_handlers(kept);
  library.freeinfo(hints);
  return error;
}

void pf_forget(struct lf_info *list) { library.freeinfo(list); }

static void close_fid(void *object) {
  struct lf_fid *fid = object;
  if (fid) fid->ops->close(fid);
}

static int open_queue(struct pf_device *d) {
  struct lf_cq_attr attr = {.format = LF_CQ_FORMAT_MSG, .wait_obj = LF_WAIT_FD};
  if (d->domain->ops->cq_open(d->domain, &attr, &d->cq, NULL) == 0) {
    if (d->cq->fid.ops->control(&d->cq->fid, LF_CONTROL_GETWAIT, &d->fd)) d->fd = -1;
    return 0;
  }
  attr.wait_obj = LF_WAIT_NONE;
  return d->domain->ops->cq_open(d->domain, &attr, &d->cq, NULL);
}

static int open_endpoint(struct pf_device *d) {
  struct lf_av_attr attr = {.type = d->info->domain_attr->av_type};
  int error = d->domain->ops->av_open(d->domain, &attr, &d->av, NULL);
  struct sigaction kept[HANDLERS];
  keep_handlers(kept);
  if (!error) error = d->domain->ops->endpoint(d->domain, d->info, &d->ep, NULL);
  restore_handlers(kept);
  if (!error) error = d->ep->fid.ops->bind(&d->ep->fid, &d->av->fid, 0);
  if (!error) error = d->ep->fid.ops->bind(&d->ep->fid, &d->cq->fid, LF_SEND | LF_RECV);
  return error ? error : d->ep->fid.ops->control(&d->ep->fid, LF_CONTROL_ENABLE, NULL);
}

int pf_open(const struct lf_info *info, struct pf_device **device) {
  struct pf_device *d = calloc(1, sizeof(*d));
  if (!d) return -ENOMEM;
  d->fd = -1;
  d->info = library.dupinfo(info);
  int error = d->info ? library.fabric(d->info->fabric_attr, &d->fabric, NULL) : -ENOMEM;
  if (!error) error = d->fabric->ops->domain(d->fabric, d->info, &d->domain, NULL);
  if (!error) error = open_queue(d);
  if (!error) error = open_endpoint(d);
  if (error) {
    pf_shut(d);
    return error;
  }
  *device = d;
  return 0;
}

void pf_down(struct pf_device *d) {
  close_fid(d->ep);
  close_fid(d->av);
  close_fid(d->cq);
  d->ep = NULL;
  d->av = NULL;
  d->cq = NULL;
}

void pf_shut(struct pf_device *d) {
  pf_down(d);
  for (struct pf_block *b = d->blocks, *next; b; b = next) {
    next = b->next;
    close_fid(b->mr);
    free(b->memory);
    free(b->ops);
    free(b);
  }
  close_fid(d->domain);
  close_fid(d->fabric);
  if (d->info) library.freeinfo(d->info);
  free(d);
}

int pf_name(struct pf_device *d, void *name, size_t *length) { return d->ep->cm->getname(&d->ep->fid, name, length); }

int pf_peer(struct pf_device *d, const void *name, uint64_t *peer) {
  int n = d->av->ops->insert(d->av, name, 1, peer, 0, NULL);
  return n == 1 ? 0 : n < 0 ? n : -EINVAL;
}

int pf_block_open(struct pf_device *d, uint32_t first, int slots, size_t slot_bytes, struct pf_block **block) {
  struct pf_block *b = calloc(1, sizeof(*b));
  if (!b) return -ENOMEM;
  b->next = d->blocks;
  d->blocks = b;
  b->slot_bytes = slot_bytes;
  b->ops = calloc((size_t)slots, sizeof(*b->ops));
  void *memory = NULL;
  if (!b->ops || posix_memalign(&memory, 4096, (size_t)slots * slot_bytes)) return -ENOMEM;
  b->memory = memory;
  for (int i = 0; i < slots; i++) b->ops[i].number = first + (uint32_t)i;
  *block = b;
  if (!(d->info->domain_attr->mr_mode & LF_MR_LOCAL)) return 0;
  return pf_register(d, b->memory, (size_t)slots * slot_bytes, (uint64_t)first, &b->mr);
}

static void *desc(struct lf_mr *mr) { return mr ? mr->mem_desc : NULL; }

int pf_receive(struct pf_device *d, struct pf_block *b, int slot) {
  char *memory = b->memory + (size_t)slot * b->slot_bytes;
  return (int)d->ep->msg->recv(d->ep, memory, b->slot_bytes, desc(b->mr), UINT64_MAX, &b->ops[slot]);
}

int pf_send(struct pf_device *d, struct pf_block *b, int slot, size_t length, uint64_t peer) {
  char *memory = b->memory + (size_t)slot * b->slot_bytes;
  return (int)d->ep->msg->send(d->ep, memory, length, desc(b->mr), peer, &b->ops[slot]);
}

int pf_read(struct pf_device *d, struct pf_block *b, int slot, void *to, size_t length, struct lf_mr *local,
            uint64_t peer, uint64_t address, uint64_t key) {
  return (int)d->ep->rma->read(d->ep, to, length, desc(local), peer, address, key, &b->ops[slot]);
}

static void note(struct pf_event *event, const struct pf_op *op, size_t length, int error) {
  *event = (struct pf_event){.number = op->number, .length = (uint32_t)length, .error = error};
}

int pf_next(struct pf_device *d, struct pf_event *events, int count) {
  struct lf_cq_msg_entry entries[16];
  int taken = 0;
  while (taken < count) {
    int most = count - taken < 16 ? count - taken : 16;
    ssize_t n = d->cq->ops->read(d->cq, entries, (size_t)most);
    if (n == -LF_EAVAIL) {
      struct lf_cq_err_entry failed = {0};
      if (d->cq->ops->readerr(d->cq, &failed, 0) <= 0) break;
      if (failed.op_context) note(&events[taken++], failed.op_context, failed.len, failed.err ? -failed.err : -EIO);
      continue;
    }
    if (n <= 0) break;
    for (ssize_t i = 0; i < n; i++)
      if (entries[i].op_context) note(&events[taken++], entries[i].op_context, entries[i].len, 0);
  }
  return taken;
}

int pf_idle(struct pf_device *d) {
  struct lf_fid *queue = &d->cq->fid;
  return d->fabric->ops->trywait(d->fabric, &queue, 1) == 0;
}

int pf_register(struct pf_device *d, void *memory, size_t length, uint64_t key, struct lf_mr **mr) {
  uint64_t access = LF_SEND | LF_RECV | LF_READ | LF_REMOTE_READ;
  int error = d->domain->mr->reg(&d->domain->fid, memory, length, access, 0, key, 0, mr, NULL);
  if (error || !(d->info->domain_attr->mr_mode & LF_MR_ENDPOINT)) return error;
  error = (*mr)->fid.ops->bind(&(*mr)->fid, &d->ep->fid, 0);
  if (!error) error = (*mr)->fid.ops->control(&(*mr)->fid, LF_CONTROL_ENABLE, NULL);
  if (error) close_fid(*mr);
  return error;
}

void pf_unregister(struct lf_mr *mr) { close_fid(mr); }
