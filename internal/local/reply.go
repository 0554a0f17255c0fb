package local

import (
	"encoding"
	"fmt"
	"strconv"
	"strings"
	"time"

	"github.com/redis/go-redis/v9"
)

// texts returns the arguments of a command as they would be sent.
func texts(args []any) []string {
	all := make([]string, len(args))
	for i, arg := range args {
		switch v := arg.(type) {
		case string:
			all[i] = v
		case []byte:
			all[i] = string(v)
		case int:
			all[i] = strconv.Itoa(v)
		case int64:
			all[i] = strconv.FormatInt(v, 10)
		case uint64:
			all[i] = strconv.FormatUint(v, 10)
		case float64:
			all[i] = strconv.FormatFloat(v, 'f', -1, 64)
		case encoding.BinaryMarshaler:
			b, _ := v.MarshalBinary()
			all[i] = string(b)
		default:
			all[i] = fmt.Sprint(v)
		}
	}
	return all
}

// A refusal is an error reply.
type refusal string

func (r refusal) Error() string { return string(r) }

func (refusal) RedisError() {}

// A scanned is the reply to SCAN: everything, in one step.
type scanned []string

// answer gives a command its reply: nil, a string, an int64, a time.Time, a scanned, or an error.
// A caller may change the bytes that it gets, so it gets its own.
func answer(cmd redis.Cmder, reply any) {
	switch v := reply.(type) {
	case error:
		cmd.SetErr(v)
		return
	case nil:
		if _, isBool := cmd.(*redis.BoolCmd); !isBool { // for SET NX
			cmd.SetErr(redis.Nil)
		}
		return
	case scanned:
		if cmd, ok := cmd.(*redis.ScanCmd); ok {
			cmd.SetVal(v, 0)
			return
		}
		reply = []any{"0", v}
	}
	switch cmd := cmd.(type) {
	case *redis.StringCmd:
		cmd.SetVal(strings.Clone(reply.(string)))
	case *redis.StatusCmd:
		cmd.SetVal(reply.(string))
	case *redis.IntCmd:
		cmd.SetVal(reply.(int64))
	case *redis.BoolCmd:
		cmd.SetVal(reply != int64(0))
	case *redis.DurationCmd:
		cmd.SetVal(durationOf(reply.(int64)))
	case *redis.TimeCmd:
		cmd.SetVal(reply.(time.Time))
	case *redis.Cmd:
		cmd.SetVal(reply)
	}
}

// durationOf returns a PTTL, as go-redis has it: negative numbers are no times.
func durationOf(ms int64) time.Duration {
	if ms < 0 {
		return time.Duration(ms)
	}
	return time.Duration(ms) * time.Millisecond
}
