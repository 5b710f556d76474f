package main

/*
#include "paceline.h"
*/
import "C"

import (
	"context"
	"encoding/json"
	"fmt"
	"time"

	"github.com/paceline/paceline/node"
	"github.com/paceline/paceline/transport/wire"
	"github.com/paceline/paceline/worker"
)

// seatJSON is the argument of pl_seat.
type seatJSON struct {
	Env     map[string]string `json:"env"`
	Ask     wire.Seat         `json:"ask"`
	Seconds float64           `json:"timeout_seconds"`
}

// longest is the most that a request waits: a time.Duration holds little more.
const longest = 100 * 365 * 24 * time.Hour

//export goSeat
func goSeat(text *C.char, buf *C.char, room C.uint64_t) C.int64_t {
	var in seatJSON
	if err := json.Unmarshal([]byte(C.GoString(text)), &in); err != nil {
		return put(nil, fmt.Errorf("%w: request for a place: %w", worker.ErrInvalid, err), buf, room)
	}
	// No signal is listened for: it would be taken from the program, which has a thread in here for most of an elastic job.
	ctx, cancel := context.WithTimeout(context.Background(), time.Duration(min(in.Seconds, longest.Seconds())*float64(time.Second)))
	defer cancel()
	answer, err := node.AskSeat(ctx, in.Env, in.Ask)
	if err != nil {
		return put(nil, err, buf, room)
	}
	out, err := json.Marshal(answer)
	return put(out, err, buf, room)
}
