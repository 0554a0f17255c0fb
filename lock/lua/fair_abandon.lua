-- Abandons an attempt in one step: leaves the queue, gives back a lease granted since, and refuses
-- its commands in transit. If it was the next, the next one is woken.
--
-- KEYS  1 lock  2 ended attempts  3 queue  4 alive  5 fence
-- ARGV  1 token  2 life of the mark, ms  3 how many marks are kept
--
-- Returns 1 if it released a lease, 0 if the attempt held nothing.

local refused
-- A foreign key does not keep the other keys from being cleaned. A refusal is retried.
local function try(...)
  local reply = redis.pcall(...)
  if type(reply) ~= 'table' or not reply.err then return reply end
  if not string.find(reply.err, 'WRONGTYPE', 1, true) then refused = refused or reply end
end

local taken = 0
local first = try('ZRANK', KEYS[3], ARGV[1]) == 0
leaveQueue(try, KEYS[3], KEYS[4], ARGV[1])
if try('GET', KEYS[1]) == ARGV[1] then
  try('DEL', KEYS[1])
  taken = 1
end
pcall(returned, redis.call, KEYS[5], ARGV[1])
if (taken == 1 or first) and redis.pcall('EXISTS', KEYS[1]) == 0 then wakeHead(KEYS[1], KEYS[3]) end
local time = redis.call('TIME')
local ms = math.floor((tonumber(time[1]) * 1000000 + tonumber(time[2])) / 1000)
mark(try, KEYS[2], ARGV[1], ms, ARGV[2], ARGV[3])
return refused or taken
