package fabric

import (
	"time"

	"go.uber.org/zap"
)

// Kind is the name of the transport in addresses.
const Kind = "fabric"

// Config is common to the connections of one node.
type Config struct {
	Secret           []byte        // the job secret
	Provider         string        // as libfabric names it, such as "verbs;ofi_rxm"; "" for the first one with hardware
	Host             string        // address at which the side connections listen, and the device where one has it
	Integrity        string        // what has authentication tags, as stream.Config has it
	HandshakeTimeout time.Duration // 0 is 10 s
	PeerTimeout      time.Duration // as stream.Config has it; 0 is 10 s
	Log              *zap.Logger   // nil is no log
}

// Device describes one of libfabric's devices.
type Device struct {
	Provider string `json:"provider"`
	Name     string `json:"name"`
}
