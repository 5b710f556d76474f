// Compares the declarations of libfabric.h with libfabric's own headers, as it is compiled.
#include "../libfabric.h"

#include <rdma/fabric.h>
#include <rdma/fi_cm.h>
#include <rdma/fi_domain.h>
#include <rdma/fi_endpoint.h>
#include <rdma/fi_eq.h>
#include <rdma/fi_errno.h>
#include <rdma/fi_rma.h>

#define AT(ours, mine, theirs, its)                                                         \
  _Static_assert(offsetof(struct ours, mine) == offsetof(struct theirs, its) &&             \
                     sizeof(((struct ours *)0)->mine) == sizeof(((struct theirs *)0)->its), \
                 #theirs "." #its)
#define SIZE(ours, theirs) _Static_assert(sizeof(struct ours) == sizeof(struct theirs), #theirs)
#define SAME(ours, theirs) _Static_assert((unsigned long long)(ours) == (unsigned long long)(theirs), #theirs)

AT(lf_fid, ops, fid, ops);
SIZE(lf_fid, fid);
AT(lf_ops, close, fi_ops, close);
AT(lf_ops, bind, fi_ops, bind);
AT(lf_ops, control, fi_ops, control);
AT(lf_tx_attr, msg_order, fi_tx_attr, msg_order);
AT(lf_rx_attr, msg_order, fi_rx_attr, msg_order);
AT(lf_ep_attr, type, fi_ep_attr, type);
AT(lf_ep_attr, protocol, fi_ep_attr, protocol);
AT(lf_domain_attr, name, fi_domain_attr, name);
AT(lf_domain_attr, threading, fi_domain_attr, threading);
AT(lf_domain_attr, resource_mgmt, fi_domain_attr, resource_mgmt);
AT(lf_domain_attr, av_type, fi_domain_attr, av_type);
AT(lf_domain_attr, mr_mode, fi_domain_attr, mr_mode);
AT(lf_domain_attr, mr_key_size, fi_domain_attr, mr_key_size);
AT(lf_fabric_attr, prov_name, fi_fabric_attr, prov_name);
AT(lf_info, next, fi_info, next);
AT(lf_info, caps, fi_info, caps);
AT(lf_info, mode, fi_info, mode);
AT(lf_info, addr_format, fi_info, addr_format);
AT(lf_info, src_addrlen, fi_info, src_addrlen);
AT(lf_info, src_addr, fi_info, src_addr);
AT(lf_info, tx_attr, fi_info, tx_attr);
AT(lf_info, rx_attr, fi_info, rx_attr);
AT(lf_info, ep_attr, fi_info, ep_attr);
AT(lf_info, domain_attr, fi_info, domain_attr);
AT(lf_info, fabric_attr, fi_info, fabric_attr);
AT(lf_fabric, ops, fid_fabric, ops);
AT(lf_ops_fabric, domain, fi_ops_fabric, domain);
AT(lf_ops_fabric, trywait, fi_ops_fabric, trywait);
AT(lf_domain, ops, fid_domain, ops);
AT(lf_domain, mr, fid_domain, mr);
AT(lf_ops_domain, av_open, fi_ops_domain, av_open);
AT(lf_ops_domain, cq_open, fi_ops_domain, cq_open);
AT(lf_ops_domain, endpoint, fi_ops_domain, endpoint);
AT(lf_ops_mr, reg, fi_ops_mr, reg);
SIZE(lf_av_attr, fi_av_attr);
AT(lf_av_attr, type, fi_av_attr, type);
SIZE(lf_cq_attr, fi_cq_attr);
AT(lf_cq_attr, format, fi_cq_attr, format);
AT(lf_cq_attr, wait_obj, fi_cq_attr, wait_obj);
AT(lf_mr, mem_desc, fid_mr, mem_desc);
AT(lf_mr, key, fid_mr, key);
AT(lf_av, ops, fid_av, ops);
AT(lf_ops_av, insert, fi_ops_av, insert);
SIZE(lf_cq_msg_entry, fi_cq_msg_entry);
AT(lf_cq_msg_entry, len, fi_cq_msg_entry, len);
SIZE(lf_cq_err_entry, fi_cq_err_entry);
AT(lf_cq_err_entry, err, fi_cq_err_entry, err);
AT(lf_cq, ops, fid_cq, ops);
AT(lf_ops_cq, read, fi_ops_cq, read);
AT(lf_ops_cq, readerr, fi_ops_cq, readerr);
AT(lf_ep, cm, fid_ep, cm);
AT(lf_ep, msg, fid_ep, msg);
AT(lf_ep, rma, fid_ep, rma);
AT(lf_ops_cm, getname, fi_ops_cm, getname);
AT(lf_ops_msg, recv, fi_ops_msg, recv);
AT(lf_ops_msg, send, fi_ops_msg, send);
AT(lf_ops_rma, read, fi_ops_rma, read);

SAME(LF_EAVAIL, FI_EAVAIL);
SAME(LF_ENOKEY, FI_ENOKEY);
SAME(LF_MSG, FI_MSG);
SAME(LF_RMA, FI_RMA);
SAME(LF_READ, FI_READ);
SAME(LF_RECV, FI_RECV);
SAME(LF_SEND, FI_SEND);
SAME(LF_REMOTE_READ, FI_REMOTE_READ);
SAME(LF_CONTEXT, FI_CONTEXT);
SAME(LF_CONTEXT2, FI_CONTEXT2);
SAME(LF_ORDER_SAS, FI_ORDER_SAS);
SAME(LF_MR_LOCAL, FI_MR_LOCAL);
SAME(LF_MR_VIRT_ADDR, FI_MR_VIRT_ADDR);
SAME(LF_MR_ALLOCATED, FI_MR_ALLOCATED);
SAME(LF_MR_PROV_KEY, FI_MR_PROV_KEY);
SAME(LF_MR_ENDPOINT, FI_MR_ENDPOINT);
SAME(LF_THREAD_SAFE, FI_THREAD_SAFE);
SAME(LF_RM_ENABLED, FI_RM_ENABLED);
SAME(LF_EP_RDM, FI_EP_RDM);
SAME(LF_CQ_FORMAT_MSG, FI_CQ_FORMAT_MSG);
SAME(LF_WAIT_NONE, FI_WAIT_NONE);
SAME(LF_WAIT_FD, FI_WAIT_FD);
SAME(LF_SOCKADDR_IN, FI_SOCKADDR_IN);
SAME(LF_SOCKADDR_IN6, FI_SOCKADDR_IN6);
SAME(LF_CONTROL_GETWAIT, FI_GETWAIT);
SAME(LF_CONTROL_ENABLE, FI_ENABLE);
SAME(sizeof(struct fi_context2), 8 * sizeof(void *));
